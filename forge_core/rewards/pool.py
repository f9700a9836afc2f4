"""Rewards in processes of their own: one that hangs or crashes costs the score of its completion and nothing else.

Calls are dealt to workers in small batches, and each call is answered by itself. So the first call without an answer is
the one being worked on: when its time is up, or its worker is gone, it has no score, and a fresh worker goes on with
the next. Which worker takes a call, and how many workers there are, decides time only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge_core.config import RewardConfig
from forge_core.examples import Example

logger = logging.getLogger(__name__)

MAX_WORKERS = 4
MAX_BATCH = 64
START_TIMEOUT_SECONDS = 300.0
START_ATTEMPTS = 3
EXIT_GRACE_SECONDS = 2.0  # from closing its channel to the end of a process; its exit code then says how it ended

Failure = Literal["timeout", "crash"]


@dataclass(frozen=True)
class RewardValues:
    """Rewards of N completions by K functions; NaN where a function gave none."""

    values: list[list[float]]  # [N][K]
    num_timeouts: int
    num_crashes: int
    extracted: list[list[str | None]]  # [N][K], the answers found; None also where nothing was to be extracted


class RewardPool:
    """Reward functions in worker processes, which stay warm between calls of `score`; `close` ends them."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        num_workers: int | None = None,
        extractors: Mapping[str, str] | None = None,
    ) -> None:
        """`extractors` names, by the `fn` of a reward, the function that says what it takes for the answer."""
        self._rewards = tuple(rewards)
        self._extractors = dict(extractors or {})
        self._num_workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._start_worker()  # not waited for: it imports while the owner has other things to do

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def score(self, rows: Sequence[tuple[str, Example]]) -> RewardValues:
        """Every function on every completion; NaN for None and for a call that took too long or ended its process.

        Raises ValueError naming the function when it raises, when it returns something that is no number, and when not
        one of its calls returned. The workers are gone then.
        """
        try:
            return self._score(rows)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the workers; returns when they are gone."""
        while self._workers:
            self._dismiss(self._workers[-1])

    def _score(self, rows: Sequence[tuple[str, Example]]) -> RewardValues:
        pending = deque((row, column) for row in range(len(rows)) for column in range(len(self._rewards)))
        num_wanted = min(self._num_workers, math.ceil(len(pending) / MAX_BATCH))
        values = [[math.nan] * len(self._rewards) for _ in rows]
        extracted: list[list[str | None]] = [[None] * len(self._rewards) for _ in rows]
        failures: Counter[tuple[Failure, int]] = Counter()
        while pending or any(worker.calls for worker in self._workers):
            while pending and len(self._workers) < num_wanted:
                self._start_worker()
            self._deal(pending, rows)
            for worker, failure in self._listen(values, extracted):
                self._dismiss(worker, grace_seconds=EXIT_GRACE_SECONDS if failure == "crash" else 0)
                if worker.calls:
                    row, column = worker.calls.popleft()
                    failures[failure, column] += 1
                    self._warn(worker, failure, column, rows[row][1])
                    pending.extendleft(reversed(worker.calls))
                elif not worker.is_ready:
                    self._count_failed_start(worker, failure)
        self._require_an_end(failures, len(rows))
        num_timeouts = sum(count for (failure, _), count in failures.items() if failure == "timeout")
        return RewardValues(values, num_timeouts, failures.total() - num_timeouts, extracted)

    def _deal(self, pending: deque[tuple[int, int]], rows: Sequence[tuple[str, Example]]) -> None:
        for worker in self._workers:
            if worker.is_idle and pending:
                # Batches shrink towards the end, so that the workers end at the same time.
                size = max(1, min(MAX_BATCH, len(pending) // (2 * self._num_workers)))
                worker.take([pending.popleft() for _ in range(size)], rows)

    def _listen(
        self, values: list[list[float]], extracted: list[list[str | None]]
    ) -> Iterator[tuple[_Worker, Failure]]:
        """Wait for answers and note them in `values` and `extracted`; yields the workers that are lost."""
        deadlines = {worker: worker.deadline(self._rewards) for worker in self._workers}
        soonest = min(deadlines.values())
        events = self._selector.select(None if soonest == math.inf else max(0.0, soonest - time.monotonic()))
        heard = [key.data for key, _ in events]
        for worker in heard:
            if not worker.receive(values, extracted):
                yield worker, "crash"
            elif worker.is_ready:
                self._failed_starts = 0
        # Only where nothing has arrived: answers may have waited for this process rather than the other way round.
        for worker, deadline in deadlines.items():
            if worker not in heard and time.monotonic() >= deadline:
                yield worker, "timeout"

    def _start_worker(self) -> None:
        worker = _Worker(self._rewards, self._extractors)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _dismiss(self, worker: _Worker, *, grace_seconds: float = 0) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.kill(grace_seconds)

    def _count_failed_start(self, worker: _Worker, failure: Failure) -> None:
        names = ", ".join(reward.fn for reward in self._rewards)
        how = f"did not start in {START_TIMEOUT_SECONDS:g} s" if failure == "timeout" else worker.obituary()
        logger.warning("a process to call %s %s", names, how)
        self._failed_starts += 1
        if self._failed_starts == START_ATTEMPTS:
            raise RuntimeError(
                f"a process to call {names} {how}, {START_ATTEMPTS} times in a row; see its last lines in the log and "
                "import the module by hand"
            )

    def _warn(self, worker: _Worker, failure: Failure, column: int, example: Example) -> None:
        reward = self._rewards[column]
        how = (
            f"did not return within {reward.timeout_seconds:g} s and was killed"
            if failure == "timeout"
            else f"ended its process, which {worker.obituary()}"
        )
        logger.warning("reward %s %s on example %s; this completion has no score", reward.fn, how, example.id)

    def _require_an_end(self, failures: Counter[tuple[Failure, int]], num_rows: int) -> None:
        for column, reward in enumerate(self._rewards):
            num_timeouts, num_crashes = failures["timeout", column], failures["crash", column]
            if num_rows and num_timeouts + num_crashes == num_rows:
                raise ValueError(
                    f"reward {reward.fn} returned for none of {num_rows} completions: {num_timeouts} took longer than "
                    f"timeout_seconds = {reward.timeout_seconds:g}, {num_crashes} ended its process; fix the function "
                    "or raise the limit"
                )


class _Worker:
    """One worker process, the calls it has in hand, and when it was last heard of."""

    def __init__(self, rewards: Sequence[RewardConfig], extractors: Mapping[str, str]) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            # In the session of its owner: a signal to the group reaches both.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forge_core.rewards.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.calls: deque[tuple[int, int]] = deque()
        self.is_ready = False
        self._unread = b""
        asked = [{"fn": one.fn, "kwargs": one.kwargs, "extractor": extractors.get(one.fn)} for one in rewards]
        self._send(json.dumps(asked))

    @property
    def is_idle(self) -> bool:
        """Whether it can take calls."""
        return self.is_ready and not self.calls and self.process.poll() is None

    def take(self, calls: list[tuple[int, int]], rows: Sequence[tuple[str, Example]]) -> None:
        """Give it these calls, each a row and the index of a function."""
        self.calls.extend(calls)
        texts = json.dumps([[column, rows[row][0]] for row, column in calls])
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
                raise ValueError(answer["error"])
            if "ready" in answer:
                self.is_ready = True
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
        return self._since + rewards[self.calls[0][1]].timeout_seconds if self.calls else math.inf

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
