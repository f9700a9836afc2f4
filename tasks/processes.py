"""The stage processes of a flow run: started when it starts, warm as long as its config says, gone when it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from forge_core.artifacts import Manifest
from forge_core.config import RunConfig
from forge_core.jobs import StageJob
from forge_core.stages.process import StageProcess

Log = logging.Logger | logging.LoggerAdapter
_current: ContextVar[StageProcesses] = ContextVar("stage_processes")


class StageProcesses:
    """One process per role on this machine. Which of them stay warm decides time only, never results."""

    def __init__(self, config: RunConfig, logger: Log) -> None:
        self._config = config
        self._logger = logger
        self._warm: dict[str, StageProcess] = {}

    def run(self, job: StageJob) -> Manifest:
        """Run a job in the process of its role; a process that does not stay warm ends with its job."""
        process = self._warm.pop(job.role, None)
        if process is None or not process.is_alive:
            process = self._start(job.role)
        manifest = process.run(job)  # ends the process when it fails
        if self._stays_warm(job.role):
            self._warm[job.role] = process
        else:
            process.close()
        return manifest

    def start_all(self) -> None:
        """Start the warm processes side by side, so that their imports overlap."""
        for role in ("scorer", "generator", "trainer"):
            if self._stays_warm(role):
                self._warm[role] = self._start(role)

    def close(self) -> None:
        """End every process; returns when they are gone."""
        while self._warm:
            self._warm.popitem()[1].close()

    def _stays_warm(self, role: str) -> bool:
        return getattr(self._config.keep_warm, role)

    def _start(self, role: str) -> StageProcess:
        num_ranks = self._config.trainer.num_ranks if role == "trainer" else 1
        return StageProcess(role, num_ranks=num_ranks, on_line=lambda line: self._logger.info("[%s] %s", role, line))


@contextmanager
def stage_processes(config: RunConfig, logger: Log) -> Iterator[StageProcesses]:
    """Stage processes that tasks called inside this block run their jobs in."""
    processes = StageProcesses(config, logger)
    token = _current.set(processes)
    try:
        processes.start_all()
        yield processes
    finally:
        _current.reset(token)
        processes.close()


def run_in_stage_process(job: StageJob) -> Manifest:
    """Run a job in the current flow's stage processes."""
    return _current.get().run(job)
