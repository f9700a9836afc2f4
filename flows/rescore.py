"""Flow `rescore`: other rewards for the rollouts that a run has stored; nothing is sampled again.

python -m flows.rescore RUN_URI exact_number my_rewards:brevity [--root ROOT] [--run-id ID]
"""

from __future__ import annotations

import argparse

from prefect import flow
from prefect.artifacts import create_table_artifact

from forge_core.again import RescoreConfig, rescore_job, scores_of, version_of
from forge_core.config import RewardConfig, RunConfig
from forge_core.operation import WarmthConfig
from tasks import stages
from tasks.run import open_run


@flow(name="rescore", flow_run_name="rescore", persist_result=False)
def rescore(config: RescoreConfig, run_id: str | None = None) -> list[dict[str, str | float]]:
    """Score every stored rollout set again; a row for each says how the mean reward changed."""
    settings = RunConfig(
        name="rescore", root=config.root, evals=(), keep_warm=WarmthConfig(trainer=False, generator=False)
    )
    rows: list[dict[str, str | float]] = []
    with open_run(settings, run_id) as run:
        for step, before in enumerate(scores_of(config.run)):
            after = run.tracker.record(stages.score(rescore_job(before, config, run.plan.run_uri)), step)
            rows.append(
                {
                    "rollouts": version_of(before),
                    "reward before": before.summary["reward/mean"],
                    "reward after": after.summary["reward/mean"],
                    "informative groups before": before.summary["groups/informative"],
                    "informative groups after": after.summary["groups/informative"],
                }
            )
            run.logger.info("%s", ", ".join(f"{name} {value}" for name, value in rows[-1].items()))
        create_table_artifact(key="rescored", description=f"{config.run} with other rewards", table=rows)
    return rows


def main() -> None:
    """Command line: score a run's rollouts again."""
    parser = argparse.ArgumentParser(prog="python -m flows.rescore", description="Score stored rollouts again.")
    parser.add_argument("run", help="URI of the run, {root}/{run_id}")
    parser.add_argument("rewards", nargs="+", help="reward functions, by built-in name or package.module:function")
    parser.add_argument("--root", default=".forge/store", help="where the new scores go")
    parser.add_argument("--run-id", help="name of the new run")
    arguments = parser.parse_args()
    rewards = tuple(RewardConfig(fn=fn) for fn in arguments.rewards)
    rescore(RescoreConfig(run=arguments.run, root=arguments.root, rewards=rewards), run_id=arguments.run_id)


if __name__ == "__main__":
    main()
