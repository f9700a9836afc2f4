"""Flow `evaluate`: a policy on held-out problems."""

from __future__ import annotations

from prefect import flow

from forge_core.artifacts import Ref
from forge_core.config import RunConfig
from tasks import stages
from tasks.notify import BAD_END
from tasks.run import Run, open_run


@flow(name="evaluate", flow_run_name="{config.name}", persist_result=False, on_failure=BAD_END, on_crashed=BAD_END)
def evaluate(config: RunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Evaluate the starting policy under every evaluation of the config."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        return measure(run, policy, step=0)


def measure(run: Run, policy: Ref, step: int) -> dict[str, float | int]:
    """Metrics of a policy under every evaluation of the config, logged at a step: the updates of GRPO before it."""
    metrics: dict[str, float | int] = {}
    for evaluation in run.plan.config.evals:
        problems = stages.dataset(run.plan.dataset(evaluation.dataset))
        report = stages.evaluate(run.plan.evaluate(policy, problems, evaluation))
        metrics |= run.tracker.record(report, step).summary
        accuracy = metrics[f"eval/{evaluation.name}/accuracy"]
        run.logger.info("%s %s: accuracy %.1f %%", policy.uri.rpartition("/")[2], evaluation.name, 100 * accuracy)
    return metrics
