"""The report of a run, read back from what it has committed."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Ref, read_manifest
from forge_core.final_report import final_report, store
from forge_core.jobs import StageJob
from forge_core.plan import Plan
from forge_core.runs import write_run
from tests.pipeline import steps, tiny_config

SECONDS = {"rollout": 3.0, "score": 1.0, "update": 4.0}
HISTORY = [{"step": 0, "validation/loss": 2.0}, {"step": 1, "loss/policy": 1.5}, {"step": 2, "loss/policy": 1.0}]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A run of three iterations, with 20 of 100 problems right before and 80 after."""
    config = tiny_config(str(tmp_path), name="mine")
    plan = Plan(config, "run")
    write_run(plan.run_uri, "run", config)
    steps(plan, commit)
    [evaluation] = config.evals
    problems = commit(plan.dataset(evaluation.dataset))
    for version, num_right in ((0, 20), (4, 80)):
        policy = read_manifest(f"{plan.run_uri}/policies/v{version:04d}")
        assert policy is not None
        commit(plan.evaluate(policy.ref, problems, evaluation), num_right)
    return plan


def commit(job: StageJob, num_right: int = 0) -> Ref:
    """A job's output as a small file; rewards are 0.5, and the seconds of each stage those above."""
    rows = [{"id": str(number), "is_right": number < num_right} for number in range(100)]
    summary: dict[str, float | int] = {"reward/mean": 0.5} if job.stage == "score" else {}
    if job.stage == "evaluate":
        share = num_right / 100
        summary = {f"eval/heldout/accuracy{end}": share + off for end, off in (("", 0), ("_low", -0.1), ("_high", 0.1))}
        summary["eval/heldout/num_examples"] = 100
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
        if job.stage == "sft":
            (Path(name) / "history.jsonl").write_text("\n".join(map(json.dumps, HISTORY)))
        return artifacts.commit(
            Path(name), job.output, kind=job.kind, job=job.as_json(), job_digest=job.digest(), inputs=job.inputs,
            summary=summary, software={}, timings={job.stage: SECONDS.get(job.stage, 1.0)},
        ).ref  # fmt: skip


def test_a_report_says_what_was_gained_and_where_the_time_went(plan: Plan):
    text = final_report(plan.run_uri).markdown
    # 60 of the 100 problems are won and none is lost: 0.2 -> 0.8, far from chance.
    assert "| heldout | 20.0% (v0000) | 80.0% (v0004) | +60.0% | +50.0% to +70.0% | 100 | better |" in text
    assert "| reward | 0.500 | 0.500 |" in text
    assert "| rollout | 9" in text  # three iterations of 3 s, and the upload
    assert "| 50% |" in text  # updates, 12 of 24 s
    assert "reference" not in text


def test_its_picture_has_a_panel_for_each_curve(plan: Plan):
    png = final_report(plan.run_uri).png
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    # Accuracy, reward, seconds and the loss of SFT: two rows of three.
    assert (width, height) == (1200, 580)


def test_it_is_stored_beside_the_artifacts_and_written_again(plan: Plan):
    report = final_report(plan.run_uri)
    for _ in range(2):
        store(plan.run_uri, report)
    assert storage.read_bytes(f"{plan.run_uri}/report.md").decode() == report.markdown
    assert storage.read_bytes(f"{plan.run_uri}/report.png") == report.png
    assert "![curves](report.png)" in report.markdown


def test_a_run_without_iterations_and_evaluations_has_a_report(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    plan = Plan(config, "young")
    write_run(plan.run_uri, "young", config)
    report = final_report(plan.run_uri)
    assert "Before and after" not in report.markdown
    assert report.png.startswith(b"\x89PNG")


def test_there_is_no_report_of_nothing(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"has no run\.json"):
        final_report(str(tmp_path))
