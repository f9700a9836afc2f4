"""Flow `nightly`: train the champion on, when there is something new to learn from.

python -m flows.nightly deployments/configs/nightly.yaml
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed

from flows.post_train import post_train
from forge_core import nightly as nights
from forge_core.artifacts import Ref
from forge_core.config import PostTrainConfig, load_config
from forge_core.operation import WarmthConfig
from forge_core.plan import Plan
from tasks import stages
from tasks.notify import BAD_END, notify
from tasks.processes import stage_processes

COLD = WarmthConfig(trainer=False, generator=False, scorer=False, reference=False)


@flow(
    name="nightly", flow_run_name="{config.name}-nightly", persist_result=False, on_failure=BAD_END, on_crashed=BAD_END
)
def nightly(config: PostTrainConfig, run_id: str | None = None) -> dict[str, float | int] | State:
    """Post-train the champion (the config's policy when there is none); skipped when data and settings are known.

    A run is named after its night, so that a retry goes on with it, and a night made up for later is the same run.
    """
    run_id = run_id or default_run_id()
    config = nights.from_champion(config, run_id)
    plan = Plan(config, run_id)
    plan.check()
    data = {name: ref.digest for name, ref in datasets(plan).items()}
    if (reason := nights.reason_to_skip(plan, data)) is not None:
        get_run_logger().warning("skipped: %s", reason)
        text = f"night {run_id} of {config.name} skipped: {reason}"
        notify(config, run_id, "skipped", text, get_run_logger())
        return Completed(name="Skipped", message=reason)
    metrics = post_train.fn(config, run_id=run_id)
    nights.record(plan, data)
    return metrics


def datasets(plan: Plan) -> dict[str, Ref]:
    """What there is to learn from tonight, materialised; no engine is started for it."""
    wanted = {"sft": plan.sft_config, "grpo": plan.grpo_config}
    with stage_processes(plan.config.model_copy(update={"keep_warm": COLD}), get_run_logger()):
        return {name: stages.dataset(plan.dataset(settings.dataset)) for name, settings in wanted.items() if settings}


def default_run_id() -> str:
    """The night that this flow run was scheduled for."""
    scheduled = runtime.flow_run.scheduled_start_time
    return f"nightly-{(scheduled or datetime.now(UTC)):%Y%m%d}"


def main() -> None:
    """Command line: run a night now."""
    parser = argparse.ArgumentParser(prog="python -m flows.nightly", description="Train the champion on.")
    parser.add_argument("config", help="a YAML file, e.g. deployments/configs/nightly.yaml")
    parser.add_argument("--run-id", help="name of the night's run")
    arguments = parser.parse_args()
    nightly(load_config(arguments.config, PostTrainConfig), run_id=arguments.run_id)


if __name__ == "__main__":
    main()
