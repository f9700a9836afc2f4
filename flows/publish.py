"""Publication, the last step of every training flow."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from forge_core.artifacts import Ref
from forge_core.publication import Publication
from tasks import stages
from tasks.run import Run


def publish(run: Run, policy: Ref, metrics: dict[str, float | int]) -> Publication:
    """Point the config's name at a policy, register it in MLflow, and leave a summary in the Prefect UI."""
    config = run.plan.config
    published = stages.publish(config.root, config.name, policy, run.plan.run_id, metrics)
    run.tracker.register(published)
    rows = "\n".join(f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items()))
    create_markdown_artifact(
        key="published-policy",
        description=f"{config.name} after run {run.plan.run_id}",
        markdown=f"# {config.name}\n\n`{published.hf_uri}`\n\n| metric | value |\n| --- | --- |\n{rows}\n",
    )
    run.logger.info("published %s -> %s", config.name, published.hf_uri)
    return published
