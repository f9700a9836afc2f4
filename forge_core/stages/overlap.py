"""Stage `overlap`: a training set and held-out sets -> which held-out problems are in training too."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from forge_core.artifacts import Manifest
from forge_core.jobs import OverlapJob
from forge_core.overlap import Found, Problem, find_overlap
from forge_core.stages.workspace import Stopwatch, Workspace

logger = logging.getLogger(__name__)

SHOWN_IDS = 5


def run(job: OverlapJob, workspace: Workspace) -> Manifest:
    """Compare prompts; the report names every problem that is in both, the log the first ones."""
    watch = Stopwatch()
    _, training_dir = workspace.fetch(job.dataset)
    lines: list[str] = []
    summary: dict[str, float] = {}
    with watch("overlap"):
        for name, count, ref in zip(job.names, job.counts, job.held_out, strict=True):
            held_out = list(islice(_problems(workspace.fetch(ref)[1]), count))
            found = find_overlap(_problems(training_dir), held_out, num_words=job.num_words)
            lines += [json.dumps({"evaluation": name} | asdict(one)) + "\n" for one in found]
            summary |= describe(found, len(held_out), name)
            if found:
                logger.warning("%s", warning(found, len(held_out), name, job.dataset.uri))
    workspace.injection.reach("work")
    with workspace.directory() as directory:
        (directory / "overlap.jsonl").write_text("".join(lines))
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def describe(found: list[Found], num_held_out: int, name: str) -> dict[str, float]:
    """Counts under their tracking names, and the share of the held-out problems."""
    num_exact = sum(one.how == "exact" for one in found)
    return {
        f"overlap/{name}/exact": num_exact,
        f"overlap/{name}/near": len(found) - num_exact,
        f"overlap/{name}/fraction": len(found) / num_held_out if num_held_out else 0.0,
    }


def warning(found: list[Found], num_held_out: int, name: str, training: str) -> str:
    """The sentence for people."""
    pairs = ", ".join(f"{one.held_out_id} ({one.how}: {one.training_id})" for one in found[:SHOWN_IDS])
    more = f" and {len(found) - SHOWN_IDS} more" if len(found) > SHOWN_IDS else ""
    return f"{len(found)} of {num_held_out} problems of the evaluation {name} are in {training} too: {pairs}{more}"


def _problems(directory: Path) -> Iterator[Problem]:
    with (directory / "examples.jsonl").open(newline="\n") as file:
        for line in file:
            yield Problem.of(json.loads(line))
