"""Flow `post-train`: start policy -> SFT -> GRPO -> publication (-> quantization), evaluated before and after each.

    python -m flows.post_train deployments/configs/quickstart.yaml [--run-id ID] [--seed N]

runs it here without a server; `prefect deployment run post-train/quickstart` runs it on a worker. The same `run_id`
continues where an earlier attempt stopped.
"""

from __future__ import annotations

import argparse

from prefect import flow

from flows.evaluate import measure
from flows.grpo import improve
from flows.publish import publish
from flows.quantize import quantize_policy
from flows.sft import fine_tune
from forge_core.config import PostTrainConfig, load_config
from forge_core.quantize_run import last_step_config
from tasks import stages
from tasks.final_report import write_report
from tasks.notify import BAD_END
from tasks.run import open_run


@flow(
    name="post-train",
    flow_run_name="{config.name}-seed{config.seed}",
    persist_result=False,
    on_failure=BAD_END,
    on_crashed=BAD_END,
)
def post_train(config: PostTrainConfig, run_id: str | None = None) -> dict[str, float | int]:
    """Turn a starting policy into a better one and publish it."""
    with open_run(config, run_id) as run:
        policy = stages.start(run.plan.start())
        measure(run, policy, step=-1)
        policy = fine_tune(run, policy)
        measure(run, policy, step=0)
        policy = improve(run, policy)
        metrics = measure(run, policy, step=config.grpo.num_iterations)
        write_report(run)
        publish(run, policy, metrics)
        if (settings := last_step_config(config)) is not None:
            quantize_policy(run, settings, policy, step=config.grpo.num_iterations + 1)
        return metrics


def main() -> None:
    """Command line: run a config file."""
    parser = argparse.ArgumentParser(prog="python -m flows.post_train", description="Run a post-training config here.")
    parser.add_argument("config", help="a YAML file, e.g. deployments/configs/quickstart.yaml")
    parser.add_argument("--run-id", help="continue or name a run")
    parser.add_argument("--seed", type=int, help="replace the config's seed")
    arguments = parser.parse_args()
    config = load_config(arguments.config, PostTrainConfig)
    if arguments.seed is not None:
        config = config.model_copy(update={"seed": arguments.seed})
    post_train(config, run_id=arguments.run_id)


if __name__ == "__main__":
    main()
