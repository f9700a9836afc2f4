"""The quickstart from nothing: services, work pool, worker, deployments, one run, and a table of what it achieved.

    make demo [SEED=0]

Uses the Prefect and MLflow servers of PREFECT_API_URL and MLFLOW_TRACKING_URI when these are set, and starts local ones
otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import LogSort

from deployments import services
from forge_core import storage
from forge_core.config import PostTrainConfig, load_config
from forge_core.plan import Plan
from forge_core.publication import Publication, published_uri
from forge_core.report import RunReport, report

HOME = Path(".forge")
DEPLOYMENT = "post-train/quickstart"
CONFIG = "deployments/configs/quickstart.yaml"
LOG_PAGE = 200


def main() -> None:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(prog="python -m deployments.demo", description="Run the quickstart from nothing.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run")
    config = load_config(CONFIG, PostTrainConfig).model_copy(update={"seed": parser.parse_args().seed})
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        say(started, "starting Prefect, MLflow and a worker")
        urls = services.start_all(stack, HOME)
        say(started, f"Prefect {urls.prefect}   MLflow {urls.mlflow}")
        flow_run = start_run(config)
        say(started, f"flow run {flow_run.name}: {urls.prefect}/runs/flow-run/{flow_run.id}")
        final = follow(flow_run, started)
        if not final.state or not final.state.is_completed():
            sys.exit(f"the run ended as {final.state_name}: {final.state.message if final.state else ''}\n"
                     f"run `make demo` again, or read {HOME}/*.log")  # fmt: skip
        figures = finish(config, f"run-{str(flow_run.id)[:8]}", time.monotonic() - started)
        print(f"Prefect UI  {urls.prefect}/runs/flow-run/{flow_run.id}\nMLflow UI   {urls.mlflow}")
        print(f"figures     {HOME / 'demo.json'}: {', '.join(figures)}")


def say(started: float, text: str) -> None:
    """One line of progress with the time since the start."""
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


def start_run(config: PostTrainConfig) -> FlowRun:
    """Start the deployment with this config."""
    parameters = json.dumps(config.model_dump(mode="json"))
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "deployment",
        "run",
        DEPLOYMENT,
        "--param",
        f"config={parameters}",
    ]
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


def finish(config: PostTrainConfig, run_id: str, wall_seconds: float) -> dict:
    """Print the table, write .forge/demo.json and return its content."""
    plan = Plan(config, run_id)
    found = report(plan)
    pointer = storage.read_bytes(f"{published_uri(config.root, config.name)}/current.json")
    hf_uri = Publication.model_validate_json(pointer).hf_uri
    path = storage.local_path(hf_uri) or hf_uri
    figures = found.model_dump() | {
        "wall_seconds": wall_seconds,
        "published_uri": str(path),
        "pointer_uri": published_uri(config.root, config.name),
        "run_uri": plan.run_uri,
    }
    (HOME / "demo.json").write_text(json.dumps(figures, indent=1))
    print(table(found, wall_seconds, config.evals[0].pass_k))
    print(f"published   {path}")
    print(f"load it     AutoModelForCausalLM.from_pretrained({str(path)!r})")
    print(f"serve it    vllm serve {path}")
    return figures


def table(found: RunReport, wall_seconds: float, k: int) -> str:
    """Accuracy and time as text."""
    lines = ["", f"{'policy':<12}{'greedy accuracy':>16}{f'pass@{k}':>10}"]
    lines += [f"{label:<12}{value:>15.1%} {found.pass_at_k[label]:>9.1%}" for label, value in found.accuracy.items()]
    lines += ["", f"{'stage':<12}{'seconds':>16}{'tokens/s':>10}"]
    for stage, seconds in found.stage_seconds.items():
        speed = found.tokens_per_second.get(stage)
        lines.append(f"{stage:<12}{seconds:>16.1f}{f'{speed:,.0f}' if speed else '-':>10}")
    lines += [
        f"{'everything':<12}{wall_seconds:>16.1f}",
        "",
        f"a GRPO iteration takes {found.iteration_seconds:.2f} s, {found.outside_fraction:.0%} of it outside generate, "
        "score and update",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
