"""One process that calls reward functions, seen from its owner: what it has in hand and when it was last heard of."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_core.config import RewardConfig
from forge_core.examples import Example

START_TIMEOUT_SECONDS = 300.0

Call = tuple[int, int]  # a row and the index of a function


class WorkerProcess:
    """One worker process, the calls it has in hand, and when it was last heard of."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        columns: Sequence[int],
        *,
        extractors: Mapping[str, str],
        takes_all: bool,
        scratch: Path | None,
    ) -> None:
        """Start it for the functions in these columns of a table; `takes_all`: the one function wants all rows at once.

        What it leaves in its temporary directory lies in `scratch`.
        """
        self.columns, self.takes_all = tuple(columns), takes_all
        self.metrics: dict[str, float] = {}
        self.channel, theirs = socket.socketpair()
        with theirs:
            # In the session of its owner: a signal to the group reaches both.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forge_core.rewards.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | ({"TMPDIR": str(scratch)} if scratch else {}),
            )
        self.calls: deque[Call] = deque()
        self.is_ready = False
        self._unread = b""
        asked = [rewards[column] for column in self.columns]
        functions = [{"fn": one.fn, "kwargs": one.kwargs, "extractor": extractors.get(one.fn)} for one in asked]
        self._send(json.dumps(functions))

    @property
    def is_idle(self) -> bool:
        """Whether it can take calls."""
        return self.is_ready and not self.calls and self.process.poll() is None

    def take(self, calls: list[Call], rows: Sequence[tuple[str, Example]]) -> None:
        """Give it these calls, each a row and the index of a function."""
        self.calls.extend(calls)
        texts = json.dumps([[self.columns.index(column), rows[row][0]] for row, column in calls])
        examples = ",".join(rows[row][1].model_dump_json() for row, _ in calls)
        self._send(f"{texts}\n[{examples}]")

    def receive(self, values: list[list[float]], extracted: list[list[str | None]]) -> bool:
        """Note the answers that have arrived; False when there is nobody to send any."""
        try:
            data = self.channel.recv(1 << 16)
        except ConnectionError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for answer in map(json.loads, lines):
            if "error" in answer:
                raise (ConnectionError if answer.get("is_transient") else ValueError)(answer["error"])
            if "ready" in answer:
                self.is_ready = True
            elif "metrics" in answer:
                self.metrics = answer["metrics"]
            else:
                row, column = self.calls.popleft()
                values[row][column] = math.nan if answer["value"] is None else answer["value"]
                extracted[row][column] = answer["extracted"]
        self._since = time.monotonic()
        return bool(data)

    def deadline(self, rewards: Sequence[RewardConfig]) -> float:
        """When to give up waiting for what it does now, in time.monotonic() seconds."""
        if not self.is_ready:
            return self._since + START_TIMEOUT_SECONDS
        if not self.calls:
            return math.inf
        num_at_once = len(self.calls) if self.takes_all else 1
        return self._since + rewards[self.calls[0][1]].timeout_seconds * num_at_once

    def kill(self, grace_seconds: float) -> None:
        """End the process, which may end by itself first, and what functions have started in it; returns when gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
        for pid in [*_descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.channel.close()

    def obituary(self) -> str:
        """How the process ended."""
        code = self.process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _send(self, text: str) -> None:
        with contextlib.suppress(ConnectionError):  # what it did not read it will not answer
            self.channel.sendall(text.encode() + b"\n")
        self._since = time.monotonic()


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended in the meantime
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in path.read_text().split():
                yield from _descendants(int(child))
                yield int(child)
