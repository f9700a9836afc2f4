"""What a stage process has between jobs: scratch space, objects it keeps warm, and work to do after it has answered."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_core import artifacts
from forge_core.artifacts import Manifest, Ref
from forge_core.jobs import StageJob
from forge_core.stages.injection import Injection

logger = logging.getLogger(__name__)


class Workspace:
    """Handed to every stage. Nothing in it decides a result: `held` is a cache, keyed by the digests jobs name."""

    def __init__(self, scratch: Path, owner_pid: int | None = None) -> None:
        self.scratch = scratch
        self.owner_pid = owner_pid
        self.rank = int(os.environ.get("RANK", "0"))
        self.held: dict[str, Any] = {}
        self._deferred: list[Callable[[], None]] = []
        self._fetched: list[set[str]] = [set(), set()]  # digests used by the previous job and by this one

    def begin_job(self, job: StageJob) -> None:
        """Called before a job is worked on: what a drill does to it starts here."""
        self.injection = Injection(job.label, job.injected, self.rank, self.owner_pid)

    def fetch(self, ref: Ref) -> tuple[Manifest, Path]:
        """The manifest of an artifact and a verified local directory of its files, valid until the next job but one."""
        self._fetched[-1].add(ref.digest)
        return artifacts.fetch(ref, self.scratch)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """An empty directory that is gone afterwards."""
        path = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def commit(
        self, job: StageJob, directory: Path, *, summary: dict, timings: dict, inputs: dict[str, Ref] | None = None
    ) -> Manifest:
        """Commit `directory` as the job's output. Only rank 0 calls this."""
        manifest = artifacts.commit(
            directory,
            job.output,
            kind=job.kind,
            job=job.as_json(),
            job_digest=job.digest(),
            inputs=inputs or job.inputs,
            summary=summary,
            software=job.software,
            timings=timings,
            on_uploaded=lambda: self.injection.reach("before_commit"),
        )
        self.injection.reach("after_commit")
        logger.info(
            "committed %s (%d files, %.2f s upload)", job.output, len(manifest.files), manifest.timings["upload"]
        )
        return manifest

    def defer(self, work: Callable[[], None]) -> None:
        """Do this after the job's answer is on its way, so that the next stage need not wait for it."""
        self._deferred.append(work)

    def finish_job(self) -> None:
        """Run deferred work and drop downloads that the last two jobs did not use."""
        while self._deferred:
            self._deferred.pop(0)()
        previous, current = self._fetched
        self._fetched = [current, set()]
        for path in (self.scratch / "artifacts").glob("*"):
            if path.name not in previous | current:
                shutil.rmtree(path, ignore_errors=True)


class Stopwatch:
    """Seconds by phase: `with watch("load"): ...` adds up under that name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


def committed(job: StageJob) -> Manifest | None:
    """The job's output when it is already committed; raises ArtifactError when another job committed there."""
    manifest = artifacts.read_manifest(job.output)
    if manifest is not None:
        artifacts.require_same_job(manifest, job.as_json(), job.digest())
    return manifest
