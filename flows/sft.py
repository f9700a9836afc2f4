"""Flow `sft`: supervised fine-tuning of a policy, evaluated before and after, and published."""

from __future__ import annotations

from prefect import flow

from flows.evaluate import measure
from flows.publish import publish
from flows.training_data import training_data
from forge_core.artifacts import Ref
from forge_core.config import SftRunConfig
from tasks import stages
from tasks.final_report import write_report
from tasks.notify import BAD_END
from tasks.run import Run, open_run


@flow(
    name="sft",
    flow_run_name="{config.name}-seed{config.seed}",
    persist_result=False,
    on_failure=BAD_END,
    on_crashed=BAD_END,
)
def sft(config: SftRunConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Fine-tune the starting policy and publish the result."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        measure(run, policy, step=0)
        policy = fine_tune(run, policy)
        metrics = measure(run, policy, step=1)
        write_report(run)
        publish(run, policy, metrics)
        return metrics


def fine_tune(run: Run, policy: Ref) -> Ref:
    """The policy after SFT; the policy as it is when the config asks for no steps."""
    settings = run.plan.sft_config
    if settings is None:
        return policy
    examples = training_data(run, settings.dataset, step=-1)
    validation = settings.validation
    heldout = stages.dataset(run.plan.dataset(validation.dataset)) if validation is not None else None
    policy = stages.sft(run.plan.sft(policy, examples, heldout))
    summary = run.tracker.record(policy, step=0).summary
    run.logger.info("sft: loss %.3f -> %.3f", summary["sft/first_loss"], summary["sft/loss"])
    return policy
