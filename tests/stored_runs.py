"""Runs as their artifacts alone: every job of a plan committed with small files, without an engine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from forge_core import artifacts
from forge_core.artifacts import Manifest, Ref
from forge_core.config import PostTrainConfig
from forge_core.jobs import RolloutJob, StageJob
from forge_core.plan import Plan
from tests.pipeline import steps

EXAMPLES = [{"id": f"{left}+{right}=", "messages": []} for left in range(3) for right in range(3)]
Rows = Callable[[RolloutJob], list[str]]
Keep = Callable[[str], list[bool]]


def two_groups(job: RolloutJob) -> list[str]:
    """Ids of the examples of a rollout set, one a completion: two of each of two problems, other ones each time."""
    first, second = (
        EXAMPLES[(2 * job.first_prompt // job.num_prompts + place) % len(EXAMPLES)]["id"] for place in (0, 1)
    )
    return [first, first, second, second]


def first_group(_rollouts: str) -> list[bool]:
    """Which completions of such a set are trained on."""
    return [True, True, False, False]


def store_run(
    config: PostTrainConfig,
    run_id: str,
    *,
    rows: Rows = two_groups,
    keep: Keep = first_group,
    spoiled: tuple[str, ...] = (),
) -> Plan:
    """Commit every artifact of a run; those named in `spoiled`, such as policies/v0002, get other bytes."""
    plan = Plan(config, run_id)

    def run(job: StageJob) -> Ref:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "content").write_text(f"{job.digest()} {job.output.endswith(spoiled)}")
            write_files(job, directory, rows, keep)
            return commit(job, directory).ref

    steps(plan, run)
    return plan


def write_files(job: StageJob, directory: Path, rows: Rows, keep: Keep) -> None:
    """The files of a dataset, of rollouts and of scores that tell which examples were trained on."""
    if job.stage == "dataset":
        (directory / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    if isinstance(job, RolloutJob):
        lines = [json.dumps({"completion": "1", "example": {"id": example}}) + "\n" for example in rows(job)]
        (directory / "rollouts.jsonl").write_text("".join(lines))
    if job.stage == "score":
        save_file({"keep": np.array(keep(job.output))}, directory / "scores.safetensors")


def commit(job: StageJob, directory: Path) -> Manifest:
    """The files in `directory` as the job's output."""
    return artifacts.commit(
        directory,
        job.output,
        kind=job.kind,
        job=job.as_json(),
        job_digest=job.digest(),
        inputs=job.inputs,
        summary={"sft/steps": 2} if job.stage == "sft" else {"reward/mean": 0.5} if job.stage == "score" else {},
        software=job.software,
        timings={},
    )
