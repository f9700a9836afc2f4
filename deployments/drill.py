"""The drill with local services: a run is disturbed on purpose and must end with the same artifacts.

    make drill

Uses the Prefect and MLflow servers of PREFECT_API_URL and MLFLOW_TRACKING_URI when these are set, and starts local ones
otherwise. The report is printed and written to .forge/drill.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import time
from pathlib import Path

from deployments import services
from deployments.runs import follow, say, start_run
from forge_core import storage
from forge_core.config import load_config
from forge_core.drill import DrillConfig, DrillReport
from forge_core.plan import Plan

HOME = Path(".forge")
DEPLOYMENT = "drill/default"


def main() -> None:
    """Command line of the drill."""
    parser = argparse.ArgumentParser(prog="python -m deployments.drill", description="Kill it anywhere, and compare.")
    parser.add_argument("config", nargs="?", default="deployments/configs/drill.yaml", help="a YAML file")
    config = load_config(parser.parse_args().config, DrillConfig)
    drill_id, started = f"drill-{secrets.token_hex(4)}", time.monotonic()
    with contextlib.ExitStack() as stack:
        say(started, "starting Prefect, MLflow and a worker")
        urls = services.start_all(stack, HOME)
        flow_run = start_run(DEPLOYMENT, {"config": config.model_dump(mode="json"), "run_id": drill_id})
        say(started, f"flow run {flow_run.name}: {urls.prefect}/runs/flow-run/{flow_run.id}")
        final = follow(flow_run, started)
        try:
            content = storage.read_bytes(f"{Plan(config.run, drill_id).run_uri}/drill.json")
        except FileNotFoundError:
            sys.exit(f"the drill ended as {final.state_name}: {final.state.message if final.state else ''}\n"
                     f"read {HOME}/*.log")  # fmt: skip
    (HOME / "drill.json").write_bytes(content)
    report = DrillReport.model_validate_json(content)
    print(report.markdown())
    print(f"figures     {HOME / 'drill.json'}: {', '.join(json.loads(content))}")
    if not report.digests_equal:
        sys.exit("artifacts differ from those of the undisturbed run")


if __name__ == "__main__":
    main()
