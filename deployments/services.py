"""Local services for the demo and the tests: a Prefect server, an MLflow server and a worker, all on loopback.

Every `start_*` returns at once, so that several start side by side; `wait_ready` then waits for them. A service is
stopped by leaving its `with` block, and dies with the process that started it however that one ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deployments.local_service import Service, answers, child_environment, free_port, start, wait_ready

REPO = Path(__file__).resolve().parent.parent
EMPTY_DATABASES = Path(sys.prefix) / "share" / "forge-flows"
POOL = "local"

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
_OPEN = """
Prefect UI  {prefect}
MLflow UI   {mlflow}

In another terminal:

  export PREFECT_API_URL={prefect}/api MLFLOW_TRACKING_URI={mlflow} PATH={bin}:$PATH
  prefect deployment run post-train/quickstart

Ctrl-C stops them all; runs and their history stay."""


def prefect_env(home: Path, api_url: str) -> dict[str, str]:
    """Environment of a Prefect client, worker or flow whose files stay under `home`."""
    return _QUIET | {
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home.resolve() / "prefect"),
        # Prefect 3.7.7 ignores PREFECT_HOME for results (PrefectHQ/prefect#23046).
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home.resolve() / "prefect" / "storage"),
    }


def start_prefect_server(home: Path, port: int = 0) -> Service:
    """A Prefect server with SQLite under `home`; `url` is the API, the UI is the same address without /api.

    It listens on `port` when that is free, otherwise on any that is.
    """
    port = free_port(port)
    url = f"http://127.0.0.1:{port}/api"
    database = home.resolve() / "prefect" / "prefect.db"
    on_ready = partial(_keep_empty, database) if _is_to_be_created(database) else None
    env = prefect_env(home, url) | {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_UI_API_URL": url,
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "server", "start"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return start("prefect-server", url, command, home, env, lambda: answers(f"{url}/health"), on_ready=on_ready)


def start_mlflow_server(home: Path, port: int = 0) -> Service:
    """An MLflow tracking server with SQLite and artifacts under `home`, on `port` when that is free."""
    port = free_port(port)
    url = f"http://127.0.0.1:{port}"
    database = home.resolve() / "mlflow" / "mlflow.db"
    on_ready = partial(_keep_empty, database) if _is_to_be_created(database) else None
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
    return start("mlflow-server", url, command, home, env, is_ready, cwd=database.parent, on_ready=on_ready)


def start_worker(pool: str, home: Path, api_url: str, *, env: Mapping[str, str] | None = None) -> Service:
    """A process worker on the default queue of `pool` (created when missing); flow runs inherit `env`.

    Scheduled runs have a queue of their own, so an overdue one does not start beside the run in hand.
    """
    name = f"{pool}-{os.getpid()}-{free_port()}"
    settings = prefect_env(home, api_url) | {
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "FORGE_HOME": str(REPO),
    }
    command = [sys.executable, "-m", "prefect", "--no-prompt", "worker", "start", "--pool", pool, "--type", "process"]
    command += ["--work-queue", "default", "--name", name, "--install-policy", "never"]

    def is_ready() -> bool:
        # Prefect's own word; asking the API would need the user's credentials when the server is theirs.
        return f"Worker {name!r} started!" in (home / "worker.log").read_text(errors="replace")

    # SIGTERM and not SIGKILL at the owner's death: it makes the worker end its flow runs, which would otherwise go on.
    return start(
        "worker", api_url, command, home, settings | dict(env or {}), is_ready, cwd=REPO, death_signal=signal.SIGTERM
    )


def deploy_all(api_url: str, home: Path) -> None:
    """Create the work pool `local` and run `prefect deploy --all`; raises RuntimeError with Prefect's words."""
    env = child_environment(prefect_env(home, api_url) | {"COLUMNS": "200"})
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
    servers: list[Service] = []

    def address(variable: str, start_server: Callable[[Path, int], Service], port: int) -> str:
        if url := os.environ.get(variable):
            return url
        servers.append(stack.enter_context(start_server(home, port)))
        return servers[-1].url

    api_url = address("PREFECT_API_URL", start_prefect_server, 4200)  # both where their users look for them
    mlflow_uri = address("MLFLOW_TRACKING_URI", start_mlflow_server, 5000)
    use(prefect_env(home, api_url) | {"MLFLOW_TRACKING_URI": mlflow_uri})
    wait_ready(*[server for server in servers if server.url == api_url])
    # Not the worker beside the deployments: its polling makes SQLite refuse their writes, and 7 s become 14 or more.
    deploy_all(api_url, home)
    worker = stack.enter_context(start_worker(POOL, home, api_url, env={"MLFLOW_TRACKING_URI": mlflow_uri}))
    wait_ready(worker, *servers)
    return Urls(prefect=api_url.removesuffix("/api"), mlflow=mlflow_uri)


def main() -> None:
    """Keep everything open until Ctrl-C or SIGTERM, with the state of earlier runs under .forge."""
    argparse.ArgumentParser(prog="python -m deployments.services", description=main.__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        print("starting Prefect, MLflow, a worker and the deployments ...", flush=True)
        urls = start_all(stack, Path(".forge"))
        print(_OPEN.format(prefect=urls.prefect, mlflow=urls.mlflow, bin=REPO / ".venv" / "bin"), flush=True)
        signal.pause()


def use(env: Mapping[str, str]) -> None:
    """Put `env` into this process's environment and let Prefect, when it is imported already, read it again."""
    os.environ.update(env)
    if context := sys.modules.get("prefect.context"):
        context.refresh_global_settings_context()


def _is_to_be_created(database: Path) -> bool:
    """Whether the server has to create its database; if one was kept by `_keep_empty`, it starts from a copy of that.

    Migrating an empty database is half of the CPU time of a server's first start.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    kept = EMPTY_DATABASES / database.name
    if not database.exists() and kept.exists():
        shutil.copyfile(kept, database)
    return not database.exists()


def _keep_empty(database: Path) -> None:
    """Keep a copy of the database a server has just created, before anything was stored in it."""
    EMPTY_DATABASES.mkdir(parents=True, exist_ok=True)
    pending = EMPTY_DATABASES / f"{database.name}.{os.getpid()}"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("VACUUM INTO ?", (str(pending),))
    pending.replace(EMPTY_DATABASES / database.name)


if __name__ == "__main__":
    main()
