"""Flow `drill`: a small post-training is disturbed on purpose; its artifacts must equal those of an undisturbed one.

python -m flows.drill deployments/configs/drill.yaml
"""

from __future__ import annotations

import argparse
import time

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from forge_core import drill as drills
from forge_core.config import load_config
from forge_core.drill import DrillConfig, DrillReport
from tasks.drill_runs import RandomKills, default_drill_id, publish_report, run_to_the_end


@flow(name="drill", flow_run_name="{config.run.name}-drill", persist_result=False)
def drill(config: DrillConfig, run_id: str | None = None) -> DrillReport:
    """Run undisturbed, run disturbed, compare, and report; fails when any artifact differs."""
    logger = get_run_logger()
    drill_id = run_id or default_drill_id()
    started = time.monotonic()
    run_to_the_end(config.run, f"{drill_id}-undisturbed", max_restarts=0, logger=logger)
    seconds_undisturbed = time.monotonic() - started
    expected = drills.artifacts_of(config, f"{drill_id}-undisturbed")

    kills = RandomKills(config.random_kills, config.seconds_to_kill, config.run.seed, logger)
    outcomes, started = [], time.monotonic()
    while not outcomes or kills.remaining:
        name = f"{drill_id}-disturbed-{len(outcomes)}"
        restarts = run_to_the_end(
            drills.disturbed(config), name, max_restarts=config.max_restarts, logger=logger, kills=kills
        )
        outcomes.append(drills.outcome(config, name, expected, restarts=restarts))
    report = drills.summarise(
        config,
        outcomes,
        random_kills=kills.victims,
        seconds_undisturbed=seconds_undisturbed,
        seconds_disturbed=time.monotonic() - started,
    )
    create_markdown_artifact(key="drill", description=f"Drill {drill_id}", markdown=report.markdown())
    publish_report(config, drill_id, report)
    logger.info("drill %s: %d faults, %d artifacts differ", drill_id, report.faults, len(report.different))
    if report.different:
        raise drills.DrillFailedError(f"{', '.join(report.different)} differ from those of {drill_id}-undisturbed")
    return report


def main() -> None:
    """Command line: drill a config file."""
    parser = argparse.ArgumentParser(prog="python -m flows.drill", description="Disturb a run and compare.")
    parser.add_argument("config", help="a YAML file, e.g. deployments/configs/drill.yaml")
    parser.add_argument("--run-id", help="name of the drill")
    arguments = parser.parse_args()
    drill(load_config(arguments.config, DrillConfig), run_id=arguments.run_id)


if __name__ == "__main__":
    main()
