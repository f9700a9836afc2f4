"""How much of the accelerator an engine uses, and how much memory: of a GPU, or else of the cores of this process."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

SAMPLE_SECONDS = 0.1


class BusyMeter:
    """Share of the time in which the accelerator was at work, over everything inside `measuring()`."""

    def __init__(self) -> None:
        self._samples: list[float] = []  # of a GPU, 0 to 1
        self._cpu_seconds, self._seconds = 0.0, 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count what happens inside of the block."""
        started, cpu_started = time.perf_counter(), time.process_time()
        with _sampled(self._samples):
            yield
        self._seconds += time.perf_counter() - started
        self._cpu_seconds += time.process_time() - cpu_started

    @property
    def busy(self) -> float:
        """From 0 to 1: of a GPU the mean of what NVML reports, of a CPU the seconds worked by all available cores."""
        if torch.cuda.is_available():
            return statistics.fmean(self._samples) if self._samples else 0.0
        return self._cpu_seconds / (self._seconds * len(os.sched_getaffinity(0))) if self._seconds else 0.0


def memory_in_use() -> int:
    """Bytes: allocated on the GPU, or else resident in this process."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss


@contextmanager
def _sampled(samples: list[float]) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append(torch.cuda.utilization() / 100)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
