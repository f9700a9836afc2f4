"""`prefect deploy --all` into a work pool that is created when missing, in one process.

    python -m deployments.deploy local

`prefect work-pool create` and `prefect deploy` would import Prefect twice, 2-5 s each.
"""

from __future__ import annotations

import contextlib
import sys

from prefect.cli import app
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.workers.process import ProcessWorker


def main() -> None:
    """Create the pool named on the command line, then deploy everything in prefect.yaml."""
    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name=sys.argv[1], type=ProcessWorker.type, base_job_template=template)
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)
    sys.argv = ["prefect", "--no-prompt", "deploy", "--all"]
    app()


if __name__ == "__main__":
    main()
