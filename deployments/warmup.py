"""Leaves in .venv what a first start would otherwise spend its time on; `make setup` runs it once.

Migrating an empty database is the larger part of a server's first start. Both servers are started once, and compact
copies of their databases kept; `deployments.services` starts from these. Meanwhile the libraries of the stages are
imported, which compiles them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from deployments.local_service import wait_ready
from deployments.services import EMPTY_DATABASES, start_mlflow_server, start_prefect_server

STAGE_LIBRARIES = "import torchtitan.trainer, vllm, transformers, datasets, reasoning_gym, math_verify, torchao"


def main() -> None:
    """Start both servers in a temporary directory, then keep their databases."""
    for name in ("prefect.db", "mlflow.db"):
        (EMPTY_DATABASES / name).unlink(missing_ok=True)
    compiling = subprocess.Popen(
        [sys.executable, "-c", STAGE_LIBRARIES], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        with start_prefect_server(home) as prefect, start_mlflow_server(home) as mlflow:
            wait_ready(prefect, mlflow)
        keep(home / "prefect" / "prefect.db")
        keep(home / "mlflow" / "mlflow.db")
    compiling.wait()


def keep(database: Path) -> None:
    """Copy a database that nothing writes to any more, its write-ahead log included."""
    EMPTY_DATABASES.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("VACUUM INTO ?", (str(EMPTY_DATABASES / database.name),))


if __name__ == "__main__":
    main()
