"""The owner's side of a stage process: start it, give it jobs, and be sure that it is gone.

The channel is a Unix socket in a private directory, one JSON object a line. A stage process exits when the channel
closes, so an owner that is killed takes its stage processes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from forge_core.artifacts import Manifest
from forge_core.jobs import StageJob

PRELOAD = {
    "trainer": ("sft", "update"),
    "generator": ("rollout", "evaluate"),
    "scorer": ("dataset", "start", "score"),
    "reference": ("reference",),
}
# Read when torch loads, so it is set before the process starts. OpenMP threads that spin while they wait take the cores
# their siblings need: with the default a training step took 28-52 s on a busy 2-core machine and 1.2 s with this. On a
# quiet one it costs nothing, where OMP_WAIT_POLICY=passive makes a step 1.4 times slower.
ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "TORCH_CPP_LOG_LEVEL": "ERROR"}
START_TIMEOUT_SECONDS = 300.0
EXIT_GRACE_SECONDS = 2.0  # for each of: closing its channel, SIGTERM, SIGKILL


class StageError(RuntimeError):
    """A stage did not deliver; `cause` is the exception type in the stage process, "died" or "timeout"."""

    def __init__(self, stage: str, cause: str, message: str) -> None:
        super().__init__(f"stage {stage} failed ({cause}): {message}")
        self.stage, self.cause = stage, cause


class _Channel:
    """The messages of one rank: JSON objects, one a line."""

    def __init__(self, accepted: socket.socket) -> None:
        self.socket = accepted
        self.socket.settimeout(None)
        self._unread = b""
        self._messages: deque[dict] = deque()

    def receive(self) -> bool:
        """Read what has arrived, waiting for something; False when the other end is closed."""
        data = self.socket.recv(1 << 16)
        *lines, self._unread = (self._unread + data).split(b"\n")
        self._messages.extend(json.loads(line) for line in lines)
        return bool(data)

    def take(self, wanted: str) -> dict | None:
        """The first message that has this field or reports an error; those before it are dropped."""
        while self._messages:
            message = self._messages.popleft()
            if wanted in message or "error" in message:
                return message
        return None


class StageProcess:
    """A process (or `num_ranks` of them under torchrun) that runs the jobs of one role, one after the other."""

    def __init__(
        self,
        role: str,
        *,
        num_ranks: int = 1,
        on_line: Callable[[str], None],
        preload: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.role = role
        self.num_ranks = num_ranks
        self._home = Path(tempfile.mkdtemp(prefix=f"forge-{role}-"))
        scratch = self._home / "scratch"
        scratch.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._home / "channel"))
        self._listener.listen(num_ranks)
        command = [sys.executable, "-m"]
        if num_ranks > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m"]
        command += ["forge_core.stages", "--connect", str(self._home / "channel"), "--scratch", str(scratch)]
        command += ["--preload", *PRELOAD[role]] if preload else []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=ENVIRONMENT | os.environ | dict(environment),
            start_new_session=True,  # a signal to the owner's group must not cut a commit in half
        )
        self._last_lines: list[str] = []
        self._reader = threading.Thread(target=self._forward, args=(on_line,), daemon=True)
        self._reader.start()
        self._channels: list[_Channel] = []

    @property
    def pid(self) -> int:
        """Process id of the stage process, or of torchrun when there are several ranks."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process can still take a job."""
        return self._process.poll() is None

    def run(self, job: StageJob, *, timeout_seconds: float | None = None) -> Manifest:
        """Give the process a job and wait for its manifest. Raises StageError, after which the process is gone."""
        try:
            deadline = time.monotonic() + (timeout_seconds or float("inf"))
            if not self._channels:
                self._accept(job.stage)
            message = json.dumps(job.as_json()).encode() + b"\n"
            for channel in self._channels:
                channel.socket.sendall(message)
            answers = self._await("manifest", job.stage, deadline)
            return Manifest.model_validate(answers[0]["manifest"])
        except ConnectionError as error:  # a channel that is reset, rather than closed, when a process is killed
            last_words = self._obituary()
            self.close()
            raise StageError(job.stage, "died", last_words) from error
        except BaseException:
            self.close()
            raise

    def finish(self, timeout_seconds: float) -> None:
        """Wait for what the process does after its answer (a snapshot), then end it."""
        try:
            if self._channels:
                self._await("idle", "finish", time.monotonic() + timeout_seconds)
        except (ConnectionError, StageError):
            pass  # its log says why; nothing that was answered depends on it
        finally:
            self.close()

    def close(self) -> None:
        """End the process and everything it started; returns when it is gone."""
        for channel in self._channels:
            with contextlib.suppress(OSError):  # it may be closed at the other end
                channel.socket.shutdown(socket.SHUT_RDWR)
            channel.socket.close()
        self._listener.close()
        for sent in (None, signal.SIGTERM, signal.SIGKILL):
            if sent is not None:
                self._signal(sent)
            try:
                self._process.wait(EXIT_GRACE_SECONDS if self._channels or sent else 0)
                break
            except subprocess.TimeoutExpired:
                continue
        self._signal(signal.SIGKILL)  # whatever is left of its session
        self._reader.join(timeout=1)
        shutil.rmtree(self._home, ignore_errors=True)

    def _accept(self, stage: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        self._listener.settimeout(0.1)
        channels: dict[int, _Channel] = {}
        while len(channels) < self.num_ranks:
            if not self.is_alive:
                raise StageError(stage, "died", self._obituary())
            if time.monotonic() > deadline:
                raise StageError(
                    stage, "timeout", f"the {self.role} process did not start in {START_TIMEOUT_SECONDS:.0f} s"
                )
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                continue
            opened = _Channel(accepted)
            hello = None
            while hello is None and opened.receive():
                hello = opened.take("rank")
            if hello:  # else it died between connecting and its first word; the next turn of the loop says how
                channels[hello["rank"]] = opened
        self._channels = [channels[rank] for rank in range(self.num_ranks)]

    def _await(self, wanted: Literal["manifest", "idle"], stage: str, deadline: float) -> dict[int, dict]:
        """What each rank says under this name; other messages (idle, after an earlier job) are passed over."""
        answers: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel.socket, selectors.EVENT_READ, rank)
            while True:
                for rank, channel in enumerate(self._channels):
                    if rank not in answers and (answer := channel.take(wanted)) is not None:
                        if "error" in answer:
                            raise StageError(stage, answer["error"]["type"], answer["error"]["message"])
                        answers[rank] = answer
                if len(answers) == self.num_ranks:
                    return answers
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StageError(
                        stage, "timeout", "the time limit of the stage has passed; raise it or make the job smaller"
                    )
                for key, _ in selector.select(None if remaining == float("inf") else remaining):
                    if self._channels[key.data].receive():
                        continue
                    if key.data not in answers:
                        raise StageError(stage, "died", self._obituary())
                    selector.unregister(key.fileobj)

    def _forward(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines = [*self._last_lines[-9:], line.rstrip()]
            on_line(line.rstrip())

    def _obituary(self) -> str:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        self._reader.join(timeout=1)
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )
        return f"the {self.role} process {how}; its last words: {' | '.join(self._last_lines) or 'none'}"

    def _signal(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, sent)
