"""A published name as a server that follows its pointer.

One server at a time: an accelerator has no room for two engines. So a new version is fetched and checked while the old
one still answers, then the old server stops, and the new one starts on the same port. When it does not become ready the
old version comes back, and the new one is not tried again until the pointer moves.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from forge_core import storage
from forge_core.artifacts import ArtifactError, fetch
from forge_core.holds import hold
from forge_core.publication import Publication, published_uri
from forge_core.serve_config import ServeConfig

PROBE_SECONDS = 0.2
STOP_GRACE_SECONDS = 10.0  # beyond draining, before SIGKILL
MAX_STARTS = 3  # in a row without becoming ready
Log = logging.Logger | logging.LoggerAdapter
Command = Callable[[Path, ServeConfig, Sequence[str]], list[str]]


class ServerError(RuntimeError):
    """A server did not become ready."""


def api_server(policy: Path, config: ServeConfig, names: Sequence[str]) -> list[str]:
    """The command that serves a policy directory with vLLM."""
    return [
        *(sys.executable, "-m", "forge_core.stages.api_server", str(policy)),
        *("--config", config.model_dump_json(), "--served-as", *names),
    ]


class Server:
    """A server process in a session of its own; it ends when this one does, since its standard input closes."""

    def __init__(self, command: list[str], config: ServeConfig, on_line: Callable[[str], None]) -> None:
        self.url = f"http://{'127.0.0.1' if config.host == '0.0.0.0' else config.host}:{config.port}"
        self._drain_seconds = config.drain_seconds
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        self._last_lines: deque[str] = deque(maxlen=10)
        self._reader = threading.Thread(target=self._forward, args=(on_line,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id, which is also that of its session."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def is_healthy(self) -> bool:
        """Whether it says of itself that it can answer."""
        return self.is_alive and _get(f"{self.url}/health") is not None

    def wait_ready(self, model: str, timeout_seconds: float) -> None:
        """Return when it serves this model; raises ServerError with its last words when it does not."""
        deadline = time.monotonic() + timeout_seconds
        # Asked for the model, because another server may listen on this port.
        while model not in (_get(f"{self.url}/v1/models") or ""):
            if not self.is_alive:
                self._reader.join(timeout=1)
                raise ServerError(f"it exited with status {self._process.returncode}: {' | '.join(self._last_lines)}")
            if time.monotonic() > deadline:
                raise ServerError(f"it was not ready after {timeout_seconds:.0f} s: {' | '.join(self._last_lines)}")
            time.sleep(PROBE_SECONDS)

    def stop(self) -> None:
        """Let it drain, end it and all that it has started; returns when its port is free."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._drain_seconds + STOP_GRACE_SECONDS)
        self._signal(signal.SIGKILL)  # whatever is left of its session
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(timeout=1)

    def _forward(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip())
            on_line(line.rstrip())

    def _signal(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, sent)


@dataclass(frozen=True)
class Served:
    """What a server answers with."""

    publication: Publication
    policy: Path

    @property
    def model(self) -> str:
        """The name in every answer, which says the version."""
        return f"{self.publication.name}@v{self.publication.version:04d}"


def follow(config: ServeConfig, logger: Log, on_switch: Callable[[Served], None]) -> NoReturn:
    """Serve a published name until this is interrupted; `on_switch` hears of each version once it answers.

    Raises ServerError when nothing is left that can be served. Whatever ends it, the server is gone afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="forge-serve-") as scratch:
        serving = Serving(config, Path(scratch), logger)
        try:
            while True:
                if serving.look() and serving.served is not None:
                    on_switch(serving.served)
                time.sleep(config.poll_seconds)
        finally:
            serving.close()


class Serving:
    """The server of a published name. `look` again and again; `close` in the end, whatever has happened."""

    def __init__(self, config: ServeConfig, scratch: Path, logger: Log, command: Command = api_server) -> None:
        self._config, self._scratch, self._logger, self._command = config, scratch, logger, command
        self._served: Served | None = None
        self._server: Server | None = None
        self._refused: Publication | None = None
        self._healthy_at = 0.0
        self._is_waiting = False

    @property
    def served(self) -> Served | None:
        """What is served now, None when nothing is."""
        return self._served if self._server is not None else None

    @property
    def pid(self) -> int | None:
        """Process id of the server, None when there is none."""
        return self._server.pid if self._server is not None else None

    def look(self) -> bool:
        """Follow the pointer and mend the server; True when another version is served than before.

        Raises ServerError when the first version cannot be served, or one that was served does not come back.
        """
        wanted = self._read_pointer()
        served = self._served.publication if self._served else None
        if wanted is not None and wanted != self._refused and (served is None or wanted.policy != served.policy):
            return self._switch(wanted)
        if self._server is not None and self._needs_restart(self._server):
            self._server.stop()
            self._start_again()
        return False

    def close(self) -> None:
        """End the server; returns when none of its processes is left."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _read_pointer(self) -> Publication | None:
        uri = f"{published_uri(self._config.root, self._config.name)}/current.json"
        try:
            found = Publication.model_validate_json(storage.read_bytes(uri))
        except FileNotFoundError:
            if not self._is_waiting:
                self._logger.warning("%s does not exist yet; waiting for a publication", uri)
            self._is_waiting = True
            return None
        except (OSError, ValidationError) as error:
            self._logger.warning("%s cannot be read, so what is served stays: %s", uri, error)
            return None
        return found

    def _switch(self, wanted: Publication) -> bool:
        """Serve another version, or what was served before when that fails."""
        try:
            with hold(self._config.root, wanted.policy, f"serving {self._config.name}"):
                _, directory = fetch(wanted.policy, self._scratch)
        except OSError as error:
            self._logger.warning("version %d of %s cannot be read now: %s", wanted.version, wanted.name, error)
            return False
        except ArtifactError as error:
            self._refuse(wanted, error)
            return False
        before, stopped_at = self._served, time.monotonic()
        self.close()
        new = Served(wanted, directory)
        try:
            self._start(new)
        except ServerError as error:
            self._refuse(wanted, error)
            if before is None:
                raise
            self._start_again()
            return False
        self._logger.info(
            "%s is served at %s/v1 as %s; nothing was served for %.1f s",
            new.model, f"http://{self._config.host}:{self._config.port}", self._config.name,
            time.monotonic() - stopped_at,
        )  # fmt: skip
        self._refused = None
        for path in (self._scratch / "artifacts").glob("*"):  # downloads; a local store is read in place
            if path.name != wanted.policy.digest:
                shutil.rmtree(path, ignore_errors=True)
        return True

    def _refuse(self, wanted: Publication, error: Exception) -> None:
        self._refused = wanted
        stays = f"{self._served.model} stays" if self._served else "nothing is served"
        self._logger.error(
            "version %d of %s cannot be served, %s until the pointer moves: %s",
            wanted.version, wanted.name, stays, error,
        )  # fmt: skip

    def _start(self, new: Served) -> None:
        """Serve this; raises ServerError when it does not become ready, and leaves nothing behind."""
        _require_free(self._config)
        command = self._command(new.policy, self._config, (new.model, self._config.name))
        server = Server(command, self._config, lambda line: self._logger.debug("[server] %s", line))
        try:
            server.wait_ready(new.model, self._config.start_timeout_seconds)
        except BaseException:  # a cancelled flow as well
            server.stop()
            raise
        self._server, self._served, self._healthy_at = server, new, time.monotonic()

    def _start_again(self) -> None:
        """Bring back what was served before."""
        self._server = None
        assert self._served is not None
        for attempt in range(1, MAX_STARTS + 1):
            try:
                self._start(self._served)
            except ServerError as error:
                if attempt == MAX_STARTS:
                    raise
                self._logger.error("%s did not come back, trying again: %s", self._served.model, error)
            else:
                self._logger.warning("%s is served again", self._served.model)
                return

    def _needs_restart(self, server: Server) -> bool:
        now = time.monotonic()
        if server.is_healthy():
            self._healthy_at = now
            return False
        if server.is_alive and now - self._healthy_at < self._config.unhealthy_seconds:
            return False
        how = f"has not answered for {now - self._healthy_at:.0f} s" if server.is_alive else "has died"
        self._logger.error("the server %s; starting it again", how)
        return True


def _require_free(config: ServeConfig) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last server may linger
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            raise ServerError(
                f"port is {config.port}, which is taken on {config.host}: {error}; use another"
            ) from error


def _get(url: str) -> str | None:
    """What an address answers, None when it does not or reports an error."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None
