"""A server as a child process: started at once, waited for, stopped by process id, and never outliving its owner."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

READY_TIMEOUT_SECONDS = 300  # a cold start takes 30-60 s when the two cores are busy
STOP_TIMEOUT_SECONDS = 10
LOG_TAIL_LINES = 20

_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec the child must do as little as possible
_PR_SET_PDEATHSIG = 1
# The user's own servers and profile must not leak into local ones.
_FOREIGN = ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_RUN_ID")


@dataclass(kw_only=True)
class Service:
    """A running server: where it listens, its process (leader of its own group) and its log."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    is_ready: Callable[[], bool]
    on_ready: Callable[[], None] | None = None
    stop_signal: signal.Signals = signal.SIGTERM

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
        for service in list(waiting):
            if service.process.poll() is not None:
                raise RuntimeError(
                    f"{service.name} exited with status {service.process.returncode} before it was ready. Its log "
                    f"{service.log} ends with:\n{service.log_tail()}\nIf a port was taken or the process was killed, "
                    "run the same command again; if its data is from another version, delete the directory of the log."
                )
            if service.is_ready():
                waiting.remove(service)
                if service.on_ready:
                    service.on_ready()
        if waiting and time.monotonic() > deadline:
            late = waiting[0]
            raise RuntimeError(
                f"{late.name} did not answer at {late.url} within {timeout_seconds:.0f} s. Its log {late.log} ends "
                f"with:\n{late.log_tail()}\nIf the machine was busy, run the same command again."
            )
        if waiting:
            time.sleep(0.1)


def free_port(wanted: int = 0) -> int:
    """A loopback port that nothing listens on at the moment; `wanted` when that is one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended a minute ago do not count
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(
    name: str,
    url: str,
    command: list[str],
    home: Path,
    env: Mapping[str, str],
    is_ready: Callable[[], bool],
    *,
    cwd: Path | None = None,
    on_ready: Callable[[], None] | None = None,
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
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=set_up_child,
        )
    return Service(
        name=name, url=url, process=process, log=log, is_ready=is_ready, on_ready=on_ready, stop_signal=stop_signal
    )


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what names the user's own servers, and with `env`."""
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN} | dict(env)


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
