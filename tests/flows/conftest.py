"""A worker of the test session's Prefect server, with every deployment."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deployments import object_stores, services
from deployments.local_service import Service, wait_ready


@pytest.fixture(scope="session")
def start_worker(
    prefect_server: Service, mlflow_server: Service, seaweed_server: Service, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Service]:
    """Starts a worker whose flow runs find MLflow and S3, and what it is given, in their environment."""
    services.deploy_all(prefect_server.url, tmp_path_factory.mktemp("deploy"))
    env = object_stores.s3_env(seaweed_server.url) | {"MLFLOW_TRACKING_URI": mlflow_server.url, "HF_HUB_OFFLINE": "1"}

    def start(**more: str) -> Service:
        home = tmp_path_factory.mktemp("worker")
        started = services.start_worker(services.POOL, home, prefect_server.url, env=env | more)
        wait_ready(started)
        return started

    return start


@pytest.fixture
def worker(start_worker: Callable[..., Service]) -> Iterator[Service]:
    with start_worker() as started:
        yield started
