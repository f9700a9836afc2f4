"""Flow `dpo`: a policy trained on preference pairs, evaluated before and after, and published."""

from __future__ import annotations

from prefect import flow

from flows.evaluate import measure
from flows.publish import publish
from flows.training_data import training_data
from forge_core.config import DpoRunConfig
from tasks import stages
from tasks.final_report import write_report
from tasks.notify import BAD_END
from tasks.run import open_run


@flow(
    name="dpo",
    flow_run_name="{config.name}-seed{config.seed}",
    persist_result=False,
    on_failure=BAD_END,
    on_crashed=BAD_END,
)
def dpo(config: DpoRunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Train the starting policy on preference pairs and publish the result."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        measure(run, policy, step=0)
        pairs = training_data(run, config.dpo.dataset, step=0)
        validation = config.dpo.validation
        heldout = stages.dataset(run.plan.dataset(validation.dataset)) if validation is not None else None
        policy = stages.dpo(run.plan.dpo(policy, pairs, heldout))
        summary = run.tracker.record(policy, step=1).summary
        run.logger.info("dpo: loss %.3f -> %.3f", summary["dpo/first_loss"], summary["dpo/loss"])
        metrics = measure(run, policy, step=1)
        write_report(run)
        publish(run, policy, metrics)
        return metrics
