"""Local services start, tell what is wrong when they do not, and are gone when their owner is."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
import yaml

from deployments import local_service, object_stores, services
from deployments.local_service import Service, fetch, free_port, start, wait_ready

REPO = Path(__file__).parents[2]
SLEEP = [sys.executable, "-c", "import time; print('sleeping', flush=True); time.sleep(600)"]


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_service_that_exits_at_once_is_reported_with_its_log(tmp_path: Path):
    command = [sys.executable, "-c", "print('port taken'); raise SystemExit(3)"]
    with (
        start("broken", "http://127.0.0.1:9", command, tmp_path, {}, lambda: False) as broken,
        pytest.raises(RuntimeError, match=r"broken exited with status 3 (.|\n)*port taken"),
    ):
        wait_ready(broken)


def test_service_that_does_not_answer_is_reported_after_the_timeout(tmp_path: Path):
    with (
        start("mute", "http://127.0.0.1:9", SLEEP, tmp_path, {}, lambda: False) as mute,
        pytest.raises(RuntimeError, match=r"mute did not answer at http://127\.0\.0\.1:9 within 1 s"),
    ):
        wait_ready(mute, timeout_seconds=1)


def test_stop_ends_children_that_ignore_the_polite_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_service, "STOP_TIMEOUT_SECONDS", 1)
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with start("stubborn", "", [sys.executable, "-c", program], tmp_path, {}, lambda: False) as stubborn:
        while not stubborn.log_tail():
            time.sleep(0.05)
        child = int(stubborn.log_tail())
    wait_gone(stubborn.pid)
    wait_gone(child)


def test_service_dies_with_an_owner_that_was_killed(tmp_path: Path):
    program = (
        "import time\nfrom pathlib import Path\nfrom deployments.local_service import start\n"
        f"print(start('orphan', '', {SLEEP!r}, Path({str(tmp_path)!r}), {{}}, lambda: True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    service = int(owner.stdout.readline())
    assert is_alive(service)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_gone(service)


def test_servers_of_the_user_do_not_reach_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://production.invalid/api")
    program = "import os; print(os.environ.get('PREFECT_API_URL'), os.environ['OWN'], flush=True)"
    with start("env", "", [sys.executable, "-c", program], tmp_path, {"OWN": "1"}, lambda: False) as service:
        service.process.wait(20)
    assert service.log_tail() == "None 1"


def test_a_port_that_is_taken_is_not_given(tmp_path: Path):
    free = free_port()
    assert free_port(free) == free
    with socket.create_server(("127.0.0.1", free)):
        assert free_port(free) not in (0, free)


def test_moto_serves_a_bucket(moto_s3: str):
    import fsspec

    fs, path = fsspec.core.url_to_fs(f"{moto_s3}/services/moto")
    fs.pipe_file(path, b"1")
    assert fs.cat_file(path) == b"1"


@pytest.mark.slow
def test_seaweedfs_keeps_objects_when_it_is_killed(tmp_path: Path):
    def objects(url: str):
        credentials = object_stores.s3_env(url)
        return boto3.client(
            "s3",
            endpoint_url=url,
            region_name=credentials["AWS_DEFAULT_REGION"],
            aws_access_key_id=credentials["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=credentials["AWS_SECRET_ACCESS_KEY"],
        )

    with object_stores.start_seaweedfs(tmp_path) as server:
        wait_ready(server)
        objects(server.url).put_object(Bucket=object_stores.BUCKET, Key="kept", Body=b"x" * 100_000)
    with object_stores.start_seaweedfs(tmp_path) as server:
        wait_ready(server)
        assert objects(server.url).get_object(Bucket=object_stores.BUCKET, Key="kept")["Body"].read() == b"x" * 100_000


@pytest.mark.slow
def test_mlflow_server_keeps_metrics_and_artifacts_under_its_home(mlflow_server: Service):
    import mlflow

    home = mlflow_server.log.parent
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 0.5)
        mlflow.log_text("hello", "note.txt")
    assert mlflow.get_run(run.info.run_id).data.metrics == {"loss": 0.5}
    assert (home / "mlflow" / "mlflow.db").exists()
    assert [path.read_text() for path in (home / "mlflow" / "artifacts").rglob("note.txt")] == ["hello"]


@pytest.mark.slow
def test_deploy_all_deploys_prefect_yaml_and_its_schedules_create_runs(prefect_server: Service, tmp_path: Path):
    services.deploy_all(prefect_server.url, tmp_path)
    services.deploy_all(prefect_server.url, tmp_path)  # again: nothing is doubled
    found = fetch(f"{prefect_server.url}/deployments/filter", {})
    assert isinstance(found, list)
    wanted = yaml.safe_load((REPO / "prefect.yaml").read_text())["deployments"]
    assert sorted(deployment["name"] for deployment in found) == sorted(deployment["name"] for deployment in wanted)
    scheduled = [deployment for deployment in found if deployment["schedules"]]
    assert [deployment["name"] for deployment in scheduled] == ["nightly"]
    assert len(scheduled[0]["schedules"]) == 1
    # Prefect 3.7.7 with SQLAlchemy 2.1 accepts the schedule and never creates a run.
    deadline = time.monotonic() + 60
    while not fetch(f"{prefect_server.url}/flow_runs/filter", {"deployments": {"id": {"any_": [scheduled[0]["id"]]}}}):
        assert time.monotonic() < deadline, prefect_server.log_tail()
        time.sleep(1)


@pytest.mark.slow
def test_worker_gives_its_environment_to_flow_runs_and_is_online_when_ready(prefect_server: Service, tmp_path: Path):
    with services.start_worker(
        "probe", tmp_path, prefect_server.url, env={"MLFLOW_TRACKING_URI": "http://m"}
    ) as worker:
        wait_ready(worker)
        environ = Path(f"/proc/{worker.pid}/environ").read_text().split("\0")
        assert {"MLFLOW_TRACKING_URI=http://m", f"FORGE_HOME={REPO}"} <= set(environ)
    assert not is_alive(worker.pid)


@pytest.mark.slow
def test_servers_named_by_the_user_are_used_as_they_are(
    prefect_server: Service, mlflow_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(services, "start_prefect_server", pytest.fail)
    monkeypatch.setattr(services, "start_mlflow_server", pytest.fail)
    before = os.environ.copy()
    with contextlib.ExitStack() as stack:
        urls = services.start_all(stack, tmp_path)
    services.use(before)
    assert (f"{urls.prefect}/api", urls.mlflow) == (prefect_server.url, mlflow_server.url)


@pytest.mark.slow
def test_everything_is_kept_open_until_it_is_interrupted(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    kept = subprocess.Popen(
        [sys.executable, "-m", "deployments.services"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert kept.stdout
    try:
        said = "".join(iter(kept.stdout.readline, "Ctrl-C stops them all; runs and their history stay.\n"))
        api, mlflow = re.findall(r"PREFECT_API_URL=(\S+) MLFLOW_TRACKING_URI=(\S+)", said)[0]
        assert local_service.answers(f"{api}/health")
        assert local_service.answers(f"{mlflow}/health")
        assert fetch(f"{api}/deployments/filter", {})
    finally:
        kept.send_signal(signal.SIGINT)
    assert kept.wait(60) == 0
    assert not local_service.answers(f"{api}/health")
    assert not local_service.answers(f"{mlflow}/health")
