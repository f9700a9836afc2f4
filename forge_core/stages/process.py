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
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from forge_core.artifacts import Manifest
from forge_core.jobs import StageJob

PRELOAD = {
    "trainer": ("sft", "update"),
    "generator": ("rollout", "evaluate"),
    "scorer": ("dataset", "start", "score"),
}
# Read when torch loads, so it is set before the process starts. OpenMP threads that spin while they wait take the cores
# their siblings need: with the default a training step took 28-52 s on a busy 2-core machine and 1.2 s with this. On a
# quiet one it costs nothing, where OMP_WAIT_POLICY=passive makes a step 1.4 times slower.
ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "TORCH_CPP_LOG_LEVEL": "ERROR"}
START_TIMEOUT_SECONDS = 300.0
EXIT_GRACE_SECONDS = 5.0


class StageError(RuntimeError):
    """A stage did not deliver; `cause` is the exception type in the stage process, "died" or "timeout"."""

    def __init__(self, stage: str, cause: str, message: str) -> None:
        super().__init__(f"stage {stage} failed ({cause}): {message}")
        self.stage, self.cause = stage, cause


class StageProcess:
    """A process (or `num_ranks` of them under torchrun) that runs the jobs of one role, one after the other."""

    def __init__(self, role: str, *, num_ranks: int = 1, on_line: Callable[[str], None], preload: bool = True) -> None:
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
            env=ENVIRONMENT | os.environ,
            start_new_session=True,  # a signal to the owner's group must not cut a commit in half
        )
        self._last_lines: list[str] = []
        self._reader = threading.Thread(target=self._forward, args=(on_line,), daemon=True)
        self._reader.start()
        self._channels: list[socket.socket] = []
        self._readers: dict[int, BinaryIO] = {}

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
                channel.sendall(message)
            return self._collect(job.stage, deadline)
        except ConnectionError as error:  # a channel that is reset, rather than closed, when a process is killed
            last_words = self._obituary()
            self.close()
            raise StageError(job.stage, "died", last_words) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and everything it started; returns when it is gone."""
        for channel in self._channels:
            channel.shutdown(socket.SHUT_RDWR)
            channel.close()
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
        channels: dict[int, socket.socket] = {}
        while len(channels) < self.num_ranks:
            if not self.is_alive:
                raise StageError(stage, "died", self._obituary())
            if time.monotonic() > deadline:
                raise StageError(
                    stage, "timeout", f"the {self.role} process did not start in {START_TIMEOUT_SECONDS:.0f} s"
                )
            try:
                channel, _ = self._listener.accept()
            except TimeoutError:
                continue
            channel.settimeout(None)
            reader = channel.makefile("rb")
            hello = reader.readline()
            if hello:  # else it died between connecting and its first word; the next turn of the loop says how
                rank = json.loads(hello)["rank"]
                channels[rank], self._readers[rank] = channel, reader
        self._channels = [channels[rank] for rank in range(self.num_ranks)]

    def _collect(self, stage: str, deadline: float) -> Manifest:
        """The manifest from rank 0 once every rank has answered."""
        answers: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            while len(answers) < self.num_ranks:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StageError(
                        stage, "timeout", "the time limit of the stage has passed; raise it or make the job smaller"
                    )
                for key, _ in selector.select(None if remaining == float("inf") else remaining):
                    line = self._readers[key.data].readline()
                    if not line:
                        raise StageError(stage, "died", self._obituary())
                    answer = json.loads(line)
                    if "error" in answer:
                        raise StageError(stage, answer["error"]["type"], answer["error"]["message"])
                    selector.unregister(key.fileobj)
                    answers[key.data] = answer
        return Manifest.model_validate(answers[0]["manifest"])

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
