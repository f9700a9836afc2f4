"""Local services for the demo and the tests: Prefect, MLflow, a worker and two S3 servers, all on loopback.

Every `start_*` returns at once, so that several start side by side; `wait_ready` then waits for them. A service is
stopped by leaving its `with` block, and dies with the process that started it however that one ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

REPO = Path(__file__).resolve().parent.parent
EMPTY_DATABASES = Path(sys.prefix) / "share" / "forge-flows"
POOL = "local"
READY_TIMEOUT_SECONDS = 300  # a cold start takes 30-60 s when the two cores are busy
STOP_TIMEOUT_SECONDS = 10
LOG_TAIL_LINES = 20

_LIBC = ctypes.CDLL(None)  # loaded here: preexec code must not import or allocate much
_PR_SET_PDEATHSIG = 1
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
# The user's own server or profile must not leak into a local one.
_FOREIGN = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_PROFILE", "MLFLOW_RUN_ID")


@dataclass(kw_only=True)
class Service:
    """A running server: where it listens, its process (leader of its own group) and its log."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    is_ready: Callable[[], bool]
    stop_signal: signal.Signals = signal.SIGTERM
    started: float = field(default_factory=time.monotonic)

    @property
    def pid(self) -> int:
        """Process id of the server, which is also its process group."""
        return self.process.pid

    def stop(self) -> None:
        """End the whole process group: politely first, with SIGKILL when that takes too long."""
        for number in (self.stop_signal, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_SECONDS)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """The last lines the server wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def wait_ready(*services: Service, timeout_seconds: float = READY_TIMEOUT_SECONDS) -> None:
    """Return when every service answers; raises RuntimeError with the end of the log of one that does not."""
    waiting = list(services)
    deadline = time.monotonic() + timeout_seconds
    while waiting:
        for service in waiting:
            if service.process.poll() is not None:
                raise RuntimeError(
                    f"{service.name} exited with status {service.process.returncode} before it was ready. Its log "
                    f"{service.log} ends with:\n{service.log_tail()}\nIf a port was taken or the process was killed, "
                    "run the same command again; if its data is from another version, delete the directory of the log."
                )
        waiting = [service for service in waiting if not service.is_ready()]
        if waiting and time.monotonic() > deadline:
            late = waiting[0]
            raise RuntimeError(
                f"{late.name} did not answer at {late.url} within {timeout_seconds:.0f} s. Its log {late.log} ends "
                f"with:\n{late.log_tail()}\nIf the machine was busy, run the same command again."
            )
        if waiting:
            time.sleep(0.1)


def free_port() -> int:
    """A loopback port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def prefect_env(home: Path, api_url: str) -> dict[str, str]:
    """Environment of a Prefect client, worker or flow whose files stay under `home`."""
    return _QUIET | {
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home.resolve() / "prefect"),
        # Prefect 3.7.7 ignores PREFECT_HOME for results (PrefectHQ/prefect#23046).
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home.resolve() / "prefect" / "storage"),
    }


def start_prefect_server(home: Path) -> Service:
    """A Prefect server with SQLite under `home`; `url` is the API, the UI is the same address without /api."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    database = _database(home / "prefect", "prefect.db")
    env = prefect_env(home, url) | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_UI_API_URL": url,
    }
    command = [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    return start("prefect-server", url, command, home, env, lambda: answers(f"{url}/health"))


def start_mlflow_server(home: Path) -> Service:
    """An MLflow tracking server with SQLite and artifacts under `home`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    database = _database(home / "mlflow", "mlflow.db")
    # `mlflow server` imports MLflow (11 s on a busy core), then starts this uvicorn process, which imports it again;
    # what it hands over are these private variables. Its job runner would start eight more processes.
    env = _QUIET | {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{database}",
        "_MLFLOW_SERVER_REGISTRY_STORE": f"sqlite:///{database}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(database.parent / "artifacts"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_ENABLE_WORKSPACES": "false",
    }

    def is_ready() -> bool:
        return answers(f"{url}/health") and answers(f"{url}/api/2.0/mlflow/experiments/search", {"max_results": 1})

    command = [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--log-level", "warning", "mlflow.server.fastapi_app:app"]
    return start("mlflow-server", url, command, home, env, is_ready, cwd=database.parent)


def start_worker(pool: str, home: Path, api_url: str, *, env: Mapping[str, str] | None = None) -> Service:
    """A process worker on `pool` (created when missing); flow runs inherit its environment, so `env` reaches them."""
    name = f"{pool}-{os.getpid()}-{free_port()}"
    settings = prefect_env(home, api_url) | {
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "FORGE_HOME": str(REPO),
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool, "--type", "process"]
    command += ["--name", name, "--install-policy", "never"]

    def is_ready() -> bool:
        online = fetch(f"{api_url}/work_pools/{pool}/workers/filter", {})
        return isinstance(online, list) and any(worker["name"] == name for worker in online)

    # SIGTERM and not SIGKILL at the owner's death: it makes the worker end its flow runs, which would otherwise go on.
    return start(
        "worker", api_url, command, home, settings | dict(env or {}), is_ready, cwd=REPO, death_signal=signal.SIGTERM
    )


def deploy_all(api_url: str, home: Path) -> None:
    """Create the work pool `local` and what `prefect deploy --all` deploys; raises RuntimeError with Prefect's words."""
    env = _environment(prefect_env(home, api_url) | {"COLUMNS": "200"})
    env.pop("FORGE_HOME", None)  # set, it would be written into the deployments instead of being read on the worker
    command = [sys.executable, "-m", "deployments.deploy", POOL]
    done = subprocess.run(command, cwd=REPO, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"prefect deploy --all failed against {api_url}:\n{done.stdout}{done.stderr}")


@dataclass(frozen=True, kw_only=True)
class Urls:
    """Addresses to open in a browser."""

    prefect: str
    mlflow: str


def start_all(stack: contextlib.ExitStack, home: Path) -> Urls:
    """Everything a run needs: both servers, a worker on the pool `local`, and the deployments of prefect.yaml.

    A server named by PREFECT_API_URL or MLFLOW_TRACKING_URI is used as it is. The environment and the Prefect settings
    of this process then point at the servers. The stack stops what was started here, the worker first.
    """
    servers: dict[str, Service] = {}
    for variable, start in (("PREFECT_API_URL", start_prefect_server), ("MLFLOW_TRACKING_URI", start_mlflow_server)):
        if not os.environ.get(variable):
            servers[variable] = stack.enter_context(start(home))
    api_url = servers["PREFECT_API_URL"].url if "PREFECT_API_URL" in servers else os.environ["PREFECT_API_URL"]
    mlflow_uri = (
        servers["MLFLOW_TRACKING_URI"].url if "MLFLOW_TRACKING_URI" in servers else os.environ["MLFLOW_TRACKING_URI"]
    )
    use(prefect_env(home, api_url) | {"MLFLOW_TRACKING_URI": mlflow_uri})
    if "PREFECT_API_URL" in servers:
        wait_ready(servers["PREFECT_API_URL"])
    worker = stack.enter_context(start_worker(POOL, home, api_url, env={"MLFLOW_TRACKING_URI": mlflow_uri}))
    deploy_all(api_url, home)  # takes about as long as the worker and MLflow need
    wait_ready(worker, *servers.values())
    return Urls(prefect=api_url.removesuffix("/api"), mlflow=mlflow_uri)


def use(env: Mapping[str, str]) -> None:
    """Put `env` into this process's environment and let Prefect, when it is imported already, read it again."""
    os.environ.update(env)
    if context := sys.modules.get("prefect.context"):
        context.refresh_global_settings_context()


def start(
    name: str,
    url: str,
    command: list[str],
    home: Path,
    env: Mapping[str, str],
    is_ready: Callable[[], bool],
    *,
    cwd: Path | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Service:
    """Start a server in its own process group with its log in `home`; it gets `death_signal` when this process ends."""
    # The kernel watches the thread that forked, so a server started in a short-lived thread would die with it.
    assert threading.current_thread() is threading.main_thread()
    home.mkdir(parents=True, exist_ok=True)

    def set_up_child() -> None:
        # A shell's `&` leaves SIGINT ignored; a Prefect worker that inherits that survives its first SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _LIBC.prctl(_PR_SET_PDEATHSIG, death_signal)

    log = home / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd or home,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=set_up_child,
        )
    return Service(name=name, url=url, process=process, log=log, is_ready=is_ready, stop_signal=stop_signal)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what names the user's own servers, and with `env`."""
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN} | dict(env)


def _database(directory: Path, name: str) -> Path:
    """Path of a service's SQLite file; a new one starts as a copy of the migrated empty database `make setup` left."""
    directory.mkdir(parents=True, exist_ok=True)
    database = directory.resolve() / name
    if not database.exists() and (EMPTY_DATABASES / name).exists():
        shutil.copyfile(EMPTY_DATABASES / name, database)
    return database


def answers(url: str, body: Mapping[str, object] | None = None) -> bool:
    """Whether the address answers a GET, or a POST of `body`, with success."""
    return fetch(url, body) is not None


def fetch(url: str, body: Mapping[str, object] | None = None) -> object:
    """The JSON (or text) an address answers with, None when it does not answer or reports an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            content = response.read()
    except (OSError, http.client.HTTPException):
        return None
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
