"""Rewards in processes of their own: one that hangs or crashes costs the score of its completion and nothing else.

Calls are dealt to workers in small batches, and each call is answered by itself. So the first call without an answer is
the one being worked on: when its time is up, or its worker is gone, it has no score, and a fresh worker goes on with
the next. Which worker takes a call, and how many workers there are, decides time only.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_core.config import RewardConfig
from forge_core.examples import Example
from forge_core.functions import is_over_batch, labels
from forge_core.rewards.process import START_TIMEOUT_SECONDS, Call, WorkerProcess

logger = logging.getLogger(__name__)

MAX_WORKERS = 4
MAX_BATCH = 64
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
    metrics: dict[str, float] = field(default_factory=dict)  # what functions over whole batches report, by their label


class RewardPool:
    """Reward functions in worker processes, which stay warm between calls of `score`; `close` ends them."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        num_workers: int | None = None,
        extractors: Mapping[str, str] | None = None,
        scratch: Path | None = None,
    ) -> None:
        """`extractors` names, by the `fn` of a reward, the function that says what it takes for the answer.

        `scratch`: where the workers' temporary files lie; the system's directory for such when it is None.
        """
        self._rewards, self._scratch = tuple(rewards), scratch
        self._extractors = dict(extractors or {})
        columns = range(len(self._rewards))
        self._over_batch = [column for column in columns if is_over_batch(self._rewards[column], "reward")]
        self._by_call = [column for column in columns if column not in self._over_batch]
        self._num_workers = num_workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._failed_starts = 0
        # Not waited for: they import while the owner has other things to do.
        for column in self._over_batch:
            self._start_worker([column], takes_all=True)
        if self._by_call:
            self._start_worker(self._by_call)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def score(self, rows: Sequence[tuple[str, Example]]) -> RewardValues:
        """Every function on every completion; NaN for None and for a call that took too long or ended its process.

        Raises ValueError naming the function when it raises, when it returns something that is no number, when not one
        of its calls returned, and when a function over the whole batch took too long or ended its process;
        ConnectionError when such a function has raised one. The workers are gone then.
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
        pending = deque((row, column) for row in range(len(rows)) for column in self._by_call)
        batches = {column: [(row, column) for row in range(len(rows))] for column in self._over_batch if rows}
        num_wanted = min(self._num_workers, math.ceil(len(pending) / MAX_BATCH))
        values = [[math.nan] * len(self._rewards) for _ in rows]
        extracted: list[list[str | None]] = [[None] * len(self._rewards) for _ in rows]
        failures: Counter[tuple[Failure, int]] = Counter()
        while pending or batches or any(worker.calls for worker in self._workers):
            self._start_what_is_missing(batches, num_wanted if pending else 0)
            self._deal(pending, batches, rows)
            for worker, failure in self._listen(values, extracted):
                self._dismiss(worker, grace_seconds=EXIT_GRACE_SECONDS if failure == "crash" else 0)
                if worker.calls and worker.takes_all:
                    raise ValueError(self._lost_batch(worker, failure, len(rows)))
                if worker.calls:
                    row, column = worker.calls.popleft()
                    failures[failure, column] += 1
                    self._warn(worker, failure, column, rows[row][1])
                    pending.extendleft(reversed(worker.calls))
                elif not worker.is_ready:
                    self._count_failed_start(worker, failure)
        self._require_an_end(failures, len(rows))
        num_timeouts = sum(count for (failure, _), count in failures.items() if failure == "timeout")
        metrics = self._metrics() if rows else {}
        return RewardValues(values, num_timeouts, failures.total() - num_timeouts, extracted, metrics)

    def _metrics(self) -> dict[str, float]:
        names = labels(self._rewards)
        return {
            f"{names[worker.columns[0]]}/{name}": value
            for worker in self._workers
            for name, value in worker.metrics.items()
        }

    def _start_what_is_missing(self, batches: dict[int, list[Call]], num_wanted: int) -> None:
        there = {worker.columns[0] for worker in self._workers if worker.takes_all}
        for column in batches.keys() - there:
            self._start_worker([column], takes_all=True)
        for _ in range(num_wanted - sum(not worker.takes_all for worker in self._workers)):
            self._start_worker(self._by_call)

    def _deal(self, pending: deque[Call], batches: dict[int, list[Call]], rows: Sequence[tuple[str, Example]]) -> None:
        for worker in self._workers:
            if not worker.is_idle:
                continue
            if worker.takes_all:
                if (calls := batches.pop(worker.columns[0], None)) is not None:
                    worker.take(calls, rows)
            elif pending:
                # Batches shrink towards the end, so that the workers end at the same time.
                size = max(1, min(MAX_BATCH, len(pending) // (2 * self._num_workers)))
                worker.take([pending.popleft() for _ in range(size)], rows)

    def _listen(
        self, values: list[list[float]], extracted: list[list[str | None]]
    ) -> Iterator[tuple[WorkerProcess, Failure]]:
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

    def _start_worker(self, columns: Sequence[int], *, takes_all: bool = False) -> None:
        worker = WorkerProcess(
            self._rewards, columns, extractors=self._extractors, takes_all=takes_all, scratch=self._scratch
        )
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._workers.append(worker)

    def _dismiss(self, worker: WorkerProcess, *, grace_seconds: float = 0) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.kill(grace_seconds)

    def _count_failed_start(self, worker: WorkerProcess, failure: Failure) -> None:
        names = ", ".join(self._rewards[column].fn for column in worker.columns)
        how = f"did not start in {START_TIMEOUT_SECONDS:g} s" if failure == "timeout" else worker.obituary()
        logger.warning("a process to call %s %s", names, how)
        self._failed_starts += 1
        if self._failed_starts == START_ATTEMPTS:
            raise RuntimeError(
                f"a process to call {names} {how}, {START_ATTEMPTS} times in a row; see its last lines in the log and "
                "import the module by hand"
            )

    def _warn(self, worker: WorkerProcess, failure: Failure, column: int, example: Example) -> None:
        reward = self._rewards[column]
        how = (
            f"did not return within {reward.timeout_seconds:g} s and was killed"
            if failure == "timeout"
            else f"ended its process, which {worker.obituary()}"
        )
        logger.warning("reward %s %s on example %s; this completion has no score", reward.fn, how, example.id)

    def _lost_batch(self, worker: WorkerProcess, failure: Failure, num_rows: int) -> str:
        reward = self._rewards[worker.columns[0]]
        how = (
            f"took longer than timeout_seconds = {reward.timeout_seconds:g} for each of them"
            if failure == "timeout"
            else f"ended its process, which {worker.obituary()}"
        )
        return f"reward {reward.fn}, which scores a batch as a whole ({num_rows} completions), {how}; see the log"

    def _require_an_end(self, failures: Counter[tuple[Failure, int]], num_rows: int) -> None:
        for column, reward in enumerate(self._rewards):
            num_timeouts, num_crashes = failures["timeout", column], failures["crash", column]
            if num_rows and num_timeouts + num_crashes == num_rows:
                raise ValueError(
                    f"reward {reward.fn} returned for none of {num_rows} completions: {num_timeouts} took longer than "
                    f"timeout_seconds = {reward.timeout_seconds:g}, {num_crashes} ended its process; fix the function "
                    "or raise the limit"
                )
