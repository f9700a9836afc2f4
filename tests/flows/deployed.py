"""Runs of deployments on a real worker, for tests."""

from __future__ import annotations

import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from pydantic import BaseModel


def start_run(config: BaseModel, run_id: str | None, deployment: str = "post-train/quickstart") -> FlowRun:
    """A run of a deployment with this config, left to the worker; `run_id` is None for a flow that takes none."""
    with get_client(sync_client=True) as client:
        found = client.read_deployment_by_name(deployment)
        parameters = {"config": config.model_dump(mode="json")} | ({"run_id": run_id} if run_id else {})
        return client.create_flow_run_from_deployment(found.id, parameters=parameters)


def finished(run: FlowRun) -> FlowRun:
    """The run once it has come to an end."""
    with get_client(sync_client=True) as client:
        while not (run.state and run.state.is_final()):
            time.sleep(1)
            run = client.read_flow_run(run.id)
        return run
