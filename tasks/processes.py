"""The stage processes of a flow run: started when it starts, warm as long as its config says, gone when it ends."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from forge_core import storage
from forge_core.artifacts import Manifest
from forge_core.config import GrpoRunConfig, RunConfig
from forge_core.faults import faults_for
from forge_core.jobs import RolloutJob, StageJob
from forge_core.reuse import reuse
from forge_core.shards import merge, split
from forge_core.stages.nodes import num_allocated, run_on_nodes
from forge_core.stages.process import PRELOAD, StageError, StageProcess
from forge_core.stages.workspace import committed
from tasks.failures import FailureClass, failure_class, is_retried, stopped
from tasks.placement import Placement
from tasks.stage_runs import Log

# As written by forge_core.stages; libraries write what they like.
_LOG_LINE = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<name>[\w./]+): (?P<message>.*)")

_current: ContextVar[StageProcesses] = ContextVar("stage_processes")


class StageProcesses:
    """One process per role on this machine. Which of them stay warm decides time only, never results."""

    def __init__(self, config: RunConfig, logger: Log) -> None:
        self._config = config
        self._logger = logger
        self.placement = Placement(config.placement, logger)
        self._warm: dict[str, StageProcess] = {}
        self._failures: Counter[tuple[str, FailureClass]] = Counter()
        self._halvings: Counter[str] = Counter()  # by role, for the rest of the run: what was too much once is again

    def run(self, job: StageJob) -> Manifest:
        """The job's output: taken over from another run when `reuse_from` allows it, else made in a stage process.

        Raises StageError when it fails in a way that another attempt may cure, StageStoppedError when it may not: call
        again and the same job is given to a fresh process, with less in memory when memory was what it lacked.
        """
        source = self._config.reuse_from
        if source is not None and (reused := reuse(job, self._run_uri(job), source, self._logger)) is not None:
            return reused
        if isinstance(job, RolloutJob) and len(parts := split(job, self._config.placement.rollout_shards)) > 1:
            self._make([part for part in parts if committed(part) is None])
            return self._make([merge(job, parts)])[0]
        return self._make([job])[0]

    def _make(self, jobs: Sequence[StageJob]) -> list[Manifest]:
        """Run jobs of one stage: at once in its pools, or here one after the other. One that fails stops no other."""
        if not jobs:
            return []
        stage, given = jobs[0].stage, [self._as_given(job) for job in jobs]
        limit = getattr(self._config.time_limits, stage)
        run = self.placement.run if self.placement.pools(stage) else self._run_here
        outcomes = run(given, limit)
        errors = [outcome for outcome in outcomes if isinstance(outcome, StageError)]
        for job, outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, StageError):
                self._decide(job, outcome)
        if errors:
            raise errors[0]
        return [outcome for outcome in outcomes if isinstance(outcome, Manifest)]

    def _as_given(self, job: StageJob) -> StageJob:
        """The job with what this attempt of it is to know."""
        return job.model_copy(
            update={
                "memory_halvings": max(job.memory_halvings, self._halvings[job.role]),
                "injected": faults_for(job.label, self._run_uri(job), self._config.fault_plan),
            }
        )

    def _run_here(self, jobs: Sequence[StageJob], limit: float) -> list[Manifest | StageError]:
        """What became of each job, in the process of its role."""
        outcomes: list[Manifest | StageError] = []
        for job in jobs:
            try:
                outcomes.append(self._run_one_here(job, limit))
            except StageError as error:
                outcomes.append(error)
        return outcomes

    def _run_one_here(self, job: StageJob, limit: float) -> Manifest:
        """Run a job in the process of its role; a process that does not stay warm ends with its job."""
        process = self._warm.pop(job.role, None)
        if process is None or not process.is_alive:
            process = self._start(job.role)
        manifest = process.run(job, timeout_seconds=limit)  # ends the process when it fails
        if self._stays_warm(job.role):
            self._warm[job.role] = process
        else:
            process.finish(limit)
        return manifest

    def _run_uri(self, job: StageJob) -> str:
        root = storage.absolute_uri(self._config.root)
        return f"{root}/{job.output.removeprefix(f'{root}/').split('/')[0]}"

    def _decide(self, job: StageJob, error: StageError) -> None:
        failure = failure_class(error)
        earlier = self._failures[job.output, failure]
        if not is_retried(error, earlier):
            raise stopped(error, job.label, earlier) from error
        self._failures[job.output, failure] += 1
        # A generator first gets a fresh engine: what it lacked may have been held by the old one.
        if failure == "out_of_memory" and (job.role != "generator" or earlier > 0):
            self._halvings[job.role] += 1
            self._logger.warning(
                "%s ran out of memory; halving what is in it (%d)", job.label, self._halvings[job.role]
            )

    def warm(self, role: str) -> StageProcess:
        """The live process of a role that stays warm."""
        return self._warm[role]

    def start_all(self) -> None:
        """Start the warm processes side by side, so that their imports overlap.

        Where stages of a role are placed elsewhere, its process starts when it gets a job, if it ever does.
        """
        self.placement.check()
        for role in ("scorer", "generator", "trainer", "reference"):
            if any(self.placement.pools(stage) for stage in PRELOAD[role]):
                continue
            if self._stays_warm(role) and (role != "reference" or self._reference_runs_on in ("own", "cpu")):
                self._warm[role] = self._start(role)

    def close(self) -> None:
        """End every process, whatever it is doing; returns when they are gone."""
        while self._warm:
            self._warm.popitem()[1].close()

    def finish(self) -> None:
        """Let every process finish the snapshot it may be writing, then end it."""
        while self._warm:
            self._warm.popitem()[1].finish(self._config.time_limits.update)

    def _stays_warm(self, role: str) -> bool:
        return getattr(self._config.keep_warm, role)

    @property
    def _reference_runs_on(self) -> str | None:
        """Where the reference policy of this run is, None when it has none."""
        grpo = self._config.grpo if isinstance(self._config, GrpoRunConfig) else None
        return grpo.reference_runs_on if grpo is not None and grpo.kl is not None else None

    def _start(self, role: str) -> StageProcess:
        is_on_cpu = role == "reference" and self._reference_runs_on == "cpu"
        return StageProcess(
            role,
            num_ranks=self._config.trainer.num_ranks if role in ("trainer", "reference") and not is_on_cpu else 1,
            on_line=stage_log(role, self._logger),
            environment={"CUDA_VISIBLE_DEVICES": ""} if is_on_cpu else {},
        )


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
        processes.finish()
    finally:
        _current.reset(token)
        processes.close()


def run_alone(job: StageJob, time_limit_seconds: float, logger: Log) -> Manifest:
    """The job's output, made in a stage process that starts for it and ends with it. Raises StageError.

    In a Slurm allocation of several nodes, a trainer of several ranks is spread over all of them.
    """
    is_on_cpu = getattr(job, "runs_on", "own") == "cpu"
    num_ranks = job.trainer.num_ranks if hasattr(job, "trainer") else 1
    if num_ranks > 1 and (num_nodes := num_allocated()) > 1:
        return run_on_nodes(
            job,
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            time_limit_seconds=time_limit_seconds,
            on_line=stage_log(job.role, logger),
        )
    process = StageProcess(
        job.role,
        num_ranks=num_ranks,
        on_line=stage_log(job.role, logger),
        preload=False,  # of its role it does this one stage
        environment={"CUDA_VISIBLE_DEVICES": ""} if is_on_cpu else {},
    )
    manifest = process.run(job, timeout_seconds=time_limit_seconds)
    process.finish(time_limit_seconds)
    return manifest


def run_in_stage_process(job: StageJob) -> Manifest:
    """Run a job in the current flow's stage processes."""
    return _current.get().run(job)
