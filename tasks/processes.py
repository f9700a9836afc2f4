"""The stage processes of a flow run: started when it starts, warm as long as its config says, gone when it ends."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from forge_core.artifacts import Manifest
from forge_core.config import RunConfig
from forge_core.jobs import StageJob
from forge_core.stages.process import StageProcess

# As written by forge_core.stages; libraries write what they like.
_LOG_LINE = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<name>[\w./]+): (?P<message>.*)")

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

    def warm(self, role: str) -> StageProcess:
        """The live process of a role that stays warm."""
        return self._warm[role]

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
        return StageProcess(role, num_ranks=num_ranks, on_line=stage_log(role, self._logger))


def stage_log(role: str, logger: Log) -> Callable[[str], None]:
    """Where the lines of a stage process go: ours at their level, errors with their traceback, the rest as DEBUG."""
    level = logging.DEBUG

    def write(line: str) -> None:
        nonlocal level
        if found := _LOG_LINE.match(line):
            level = logging.getLevelNamesMapping()[found["level"]]
            if level < logging.ERROR and not found["name"].startswith("forge_core"):
                level = logging.DEBUG
        elif level < logging.ERROR:
            level = logging.DEBUG
        logger.log(level, "[%s] %s", role, found["message"] if found and level < logging.ERROR else line)

    return write


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
