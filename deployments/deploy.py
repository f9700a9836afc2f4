"""`prefect deploy --all` into a work pool that is created when missing, in one process.

    python -m deployments.deploy local

Two calls of the `prefect` command would import Prefect twice, 2-5 s each.
"""

from __future__ import annotations

import sys

from prefect.cli import app
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound


def main() -> None:
    """Create the pool named on the command line, then deploy everything in prefect.yaml."""
    pool = sys.argv[1]
    with get_client(sync_client=True) as client:
        try:
            client.read_work_pool(pool)
        except ObjectNotFound:
            prefect("work-pool", "create", pool, "--type", "process")
    prefect("deploy", "--all")


def prefect(*arguments: str) -> None:
    """Run a `prefect` command in this process; raises SystemExit with its status when it fails."""
    sys.argv = ["prefect", "--no-prompt", *arguments]
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
