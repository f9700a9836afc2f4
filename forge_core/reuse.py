"""Artifacts of other runs, taken over when the same job made them.

The same job has the same digest: inputs by digest, settings, source of user functions, versions of the software. What
is taken over is copied, so that a run stays whole when the other one is deleted; its manifest says where it came from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from forge_core import artifacts, storage
from forge_core.artifacts import Manifest, read_manifest
from forge_core.differences import job_differences
from forge_core.jobs import StageJob
from forge_core.runs import is_run

Log = logging.Logger | logging.LoggerAdapter

NOT_RUNS = ("published", "holds")


def reuse(job: StageJob, run_uri: str, source: str, log: Log) -> Manifest | None:
    """The job's output, taken over from `source` (a run or a root of runs); None when no run there made it.

    Says why in the log, either way.
    """
    name = job.output.removeprefix(f"{run_uri}/")
    for other in _runs(source, run_uri):
        candidate = read_manifest(f"{other}/{name}")
        if candidate is None:
            continue
        if artifacts.is_pruned(candidate.uri):
            log.info("%s is not taken over from %s: retention pruned its files", job.label, candidate.uri)
        elif candidate.job_digest == job.digest():
            log.info("%s is taken over from %s: the same job made it", job.label, candidate.uri)
            return _copy(candidate, job)
        else:
            reasons = job_differences(candidate, job.as_json(), job.software)
            log.info("%s is not taken over from %s: %s", job.label, candidate.uri, "; ".join(reasons))
    return None


def _runs(source: str, own: str) -> Iterator[str]:
    source = storage.absolute_uri(source)
    if is_run(source):
        yield source
        return
    names = storage.list_names(source)
    if not names:
        raise ValueError(f"reuse_from is {source}, which holds no run; give a root or a run, {{root}}/{{run_id}}")
    for name in names:
        if name not in NOT_RUNS and not name.startswith(".") and f"{source}/{name}" != own:
            yield f"{source}/{name}"


def _copy(candidate: Manifest, job: StageJob) -> Manifest:
    """Copy the files of a committed artifact and commit them as the output of an equal job."""
    started = time.perf_counter()
    attempt = artifacts.new_attempt()
    for record in candidate.files:
        storage.copy(f"{candidate.files_uri}/{record.path}", f"{job.output}/{attempt}/{record.path}")
    return artifacts.commit_uploaded(
        candidate.model_copy(
            update={
                "uri": job.output,
                "attempt": attempt,
                "inputs": job.inputs,
                "job": job.as_json(),
                "timings": {"reuse": time.perf_counter() - started},
                "created_at": datetime.now(UTC).isoformat(),
                "reused_from": candidate.ref,
            }
        )
    )
