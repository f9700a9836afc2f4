"""Real services for tests, each started once per session on a free port and stopped by process id.

Nothing here reaches the network: hubs are off, credentials and servers of the user are hidden.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any test module imports Prefect or MLflow, which read these once.
for name in [name for name in os.environ if name.startswith(("AWS_", "PREFECT_", "MLFLOW_", "FORGE_"))]:
    del os.environ[name]
_HOME = Path(tempfile.mkdtemp(prefix="forge-flows-tests-"))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_HOME": str(_HOME / "prefect"),
    "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(_HOME / "prefect" / "storage"),
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # the default, 20 s, is short on a busy machine
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}

from deployments import object_stores, services
from deployments.local_service import Service, wait_ready
from tests.webhook import Webhook, listening


def pytest_unconfigure() -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A Prefect server; PREFECT_API_URL and this process's settings point at it while it runs."""
    with services.start_prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        wait_ready(server)
        before = os.environ.copy()
        services.use({"PREFECT_API_URL": server.url})
        yield server
        del os.environ["PREFECT_API_URL"]
        services.use(before)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """An MLflow server; MLFLOW_TRACKING_URI points at it while it runs."""
    with (
        services.start_mlflow_server(tmp_path_factory.mktemp("mlflow")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        wait_ready(server)
        patch.setenv("MLFLOW_TRACKING_URI", server.url)
        yield server


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    """An address that people are told at."""
    with listening() as hook:
        yield hook


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """moto's S3 server."""
    with object_stores.start_moto(tmp_path_factory.mktemp("moto")) as server:
        wait_ready(server)
        yield server


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A SeaweedFS server with an S3 endpoint."""
    with object_stores.start_seaweedfs(tmp_path_factory.mktemp("seaweed")) as server:
        wait_ready(server)
        yield server


@pytest.fixture
def moto_s3(moto_server: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of an S3 bucket in memory, with the environment that leads there."""
    yield from _bucket(moto_server, monkeypatch)


@pytest.fixture
def seaweed_s3(seaweed_server: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of an S3 bucket on disk, with the environment that leads there."""
    yield from _bucket(seaweed_server, monkeypatch)


def _bucket(server: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The bucket of a server; s3fs caches its connections by arguments, not by environment, so they are dropped."""
    from s3fs import S3FileSystem

    for name, value in object_stores.s3_env(server.url).items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    yield f"s3://{object_stores.BUCKET}"
    S3FileSystem.clear_instance_cache()
