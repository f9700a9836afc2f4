"""`forge eval-harness`: benchmarks of a policy as a table."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deployments.lm_eval import HarnessSettings, evaluate
from forge_core.manifests import find


def run_harness(
    uri: str,
    settings: HarnessSettings,
    *,
    python: str,
    include_path: Path | None,
    num_concurrent: int,
    as_json: bool,
) -> None:
    """Print the metrics of the policy that a URI stands for, and where the results are."""
    made = evaluate(find(uri), settings, python=python, include_path=include_path, num_concurrent=num_concurrent)
    if as_json:
        sys.stdout.write(made.model_dump_json(indent=1) + "\n")
        return
    table = Table("task", "metric", "value", box=None, padding=(0, 1))
    for name, value in made.summary.items():
        _, task, metric = name.split("/", 2)
        table.add_row(task, metric, f"{value:.4g}")
    Console().print(table)
    sys.stdout.write(f"results {made.files_uri}\n")
