"""The quickstart from nothing: services, work pool, worker, deployments, one run, and a table of what it achieved.

    make demo [SEED=0]

Uses the Prefect and MLflow servers of PREFECT_API_URL and MLFLOW_TRACKING_URI when these are set, and starts local ones
otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

from deployments import services
from deployments.runs import follow, say, start_run
from forge_core import storage
from forge_core.config import PostTrainConfig, load_config
from forge_core.plan import Plan
from forge_core.publication import Publication, published_uri
from forge_core.report import RunReport, report

HOME = Path(".forge")
DEPLOYMENT = "post-train/quickstart"
CONFIG = "deployments/configs/quickstart.yaml"


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
        flow_run = start_run(DEPLOYMENT, {"config": config.model_dump(mode="json")})
        say(started, f"flow run {flow_run.name}: {urls.prefect}/runs/flow-run/{flow_run.id}")
        final = follow(flow_run, started)
        if not final.state or not final.state.is_completed():
            sys.exit(f"the run ended as {final.state_name}: {final.state.message if final.state else ''}\n"
                     f"run `make demo` again, or read {HOME}/*.log")  # fmt: skip
        figures = finish(config, f"run-{str(flow_run.id)[:8]}", time.monotonic() - started)
        print(f"figures     {HOME / 'demo.json'}: {', '.join(figures)}")
        print(f"look at it  make services, then {urls.prefect}/runs/flow-run/{flow_run.id} and {urls.mlflow}")


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
