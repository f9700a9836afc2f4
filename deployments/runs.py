"""Runs of deployments from a command line: start one, and print its log as it grows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import LogSort
from pydantic import JsonValue

LOG_PAGE = 200


def say(started: float, text: str) -> None:
    """One line of progress with the time since the start."""
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


def start_run(deployment: str, parameters: dict[str, JsonValue]) -> FlowRun:
    """Start a deployment with these parameters."""
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deployment", "run", deployment]
    for name, value in parameters.items():
        command += ["--param", f"{name}={json.dumps(value)}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    found = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)
    if done.returncode or not found:
        sys.exit(f"prefect deployment run failed:\n{done.stdout}{done.stderr}")
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(found.group()))


def follow(flow_run: FlowRun, started: float) -> FlowRun:
    """Print the run's log as it grows, without the lines of stage processes; returns the finished run."""
    with get_client(sync_client=True) as client:
        chosen = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id]))
        num_read = 0
        while True:
            current = client.read_flow_run(flow_run.id)
            while page := client.read_logs(chosen, limit=LOG_PAGE, offset=num_read, sort=LogSort.TIMESTAMP_ASC):
                num_read += len(page)
                for entry in page:
                    if entry.name == "prefect.flow_runs" and not entry.message.startswith("["):
                        say(started, entry.message)
            if current.state and current.state.is_final():
                return current
            time.sleep(1)
