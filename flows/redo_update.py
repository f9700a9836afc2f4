"""Flow `redo-update`: one update once more with another loss, from the same policy, optimizer state and rollouts.

python -m flows.redo_update POLICY_URI LOSS [name=value ...] [--root ROOT] [--run-id ID]
"""

from __future__ import annotations

import argparse

import yaml
from prefect import flow
from prefect.artifacts import create_table_artifact

from forge_core.again import RedoConfig, redo_job
from forge_core.artifacts import ArtifactError, read_manifest
from forge_core.config import FunctionConfig, RunConfig
from forge_core.jobs import UpdateJob
from forge_core.operation import WarmthConfig
from forge_core.storage import absolute_uri
from tasks import stages
from tasks.run import open_run


@flow(name="redo-update", flow_run_name="redo-update-{config.loss.fn}", persist_result=False)
def redo_update(config: RedoConfig, run_id: str | None = None) -> list[dict[str, str | float]]:
    """Make the policy again with the other loss; a row for each metric compares the two updates."""
    before = read_manifest(absolute_uri(config.policy))
    if before is None or before.job["stage"] != "update":
        raise ArtifactError(f"{config.policy} is no policy that an update made; give the URI of such a version")
    settings = RunConfig(
        name="redo-update",
        root=config.root,
        evals=(),
        trainer=UpdateJob.model_validate(before.job).trainer,
        keep_warm=WarmthConfig(generator=False, scorer=False),
    )
    with open_run(settings, run_id) as run:
        after = run.tracker.record(stages.update(redo_job(before, run.plan.run_uri, config.loss)), 0)
        rows: list[dict[str, str | float]] = [
            {"metric": name, "before": value, "after": after.summary.get(name, float("nan"))}
            for name, value in sorted(before.summary.items())
        ]
        create_table_artifact(key="redone-update", description=f"{config.policy} with {config.loss.fn}", table=rows)
        run.logger.info("%s -> %s", before.uri, after.uri)
        return rows


def main() -> None:
    """Command line: make a policy again with another loss."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.redo_update", description="Redo an update with another loss."
    )
    parser.add_argument("policy", help="URI of the policy version, {root}/{run_id}/policies/v0003")
    parser.add_argument("loss", help="loss, by built-in name or package.module:function")
    parser.add_argument("kwargs", nargs="*", help="arguments of the loss, name=value")
    parser.add_argument("--root", default=".forge/store", help="where the new policy goes")
    parser.add_argument("--run-id", help="name of the new run")
    arguments = parser.parse_args()
    pairs = (pair.partition("=") for pair in arguments.kwargs)
    kwargs = {name: yaml.safe_load(value) for name, _, value in pairs}
    loss = FunctionConfig(fn=arguments.loss, kwargs=kwargs)
    redo_update(RedoConfig(policy=arguments.policy, root=arguments.root, loss=loss), run_id=arguments.run_id)


if __name__ == "__main__":
    main()
