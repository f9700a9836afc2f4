"""Gates by hand, on evaluations that are really stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core import artifacts
from forge_core.artifacts import ArtifactError, Manifest
from forge_core.gates import failures
from forge_core.quantization.gates import check_gates, paired_accuracy
from forge_core.quantize_config import QuantizeGatesConfig

SUMMARY = {"quantize/mae": 0.004}


def evaluation(tmp_path: Path, name: str, verdicts: dict[str, bool]) -> Manifest:
    directory = tmp_path / f"{name}-files"
    directory.mkdir()
    lines = [json.dumps({"id": problem, "is_right": is_right}) + "\n" for problem, is_right in verdicts.items()]
    (directory / "samples.jsonl").write_text("".join(lines))
    return artifacts.commit(
        directory,
        (tmp_path / name).as_uri(),
        kind="eval",
        job={},
        job_digest=name,
        inputs={},
        summary={},
        software={},
        timings={},
    )


def test_accuracies_are_compared_problem_by_problem(tmp_path: Path):
    before = evaluation(tmp_path, "before", {"a": True, "b": True, "c": False, "d": True})
    after = evaluation(tmp_path, "after", {"d": True, "c": True, "b": False, "a": False})
    found = paired_accuracy("heldout", before, after)
    assert (found.before, found.after, found.drop) == (0.75, 0.5, 0.25)
    assert (found.num_lost, found.num_gained) == (2, 1)
    # differences 1, 1, -1, 0: variance (0.75^2 + 0.75^2 + 1.25^2 + 0.25^2) / 3 = 0.9167
    assert found.drop_high == pytest.approx(0.25 + 1.96 * (0.916667 / 4) ** 0.5, abs=1e-5)


def test_evaluations_of_different_problems_are_not_compared(tmp_path: Path):
    before, after = evaluation(tmp_path, "before", {"a": True}), evaluation(tmp_path, "after", {"b": True})
    with pytest.raises(ArtifactError, match="different problems"):
        paired_accuracy("heldout", before, after)


@pytest.mark.parametrize(
    ("num_lost", "settings", "summary", "failed"),
    [
        (2, {}, {}, []),  # 2 of 100 is the bound itself
        (3, {}, {}, ["accuracy drop on heldout is 0.03, above 0.02"]),
        (2, {"require_confidence": True}, {}, ["upper end of the accuracy drop on heldout is 0.04758, above 0.02"]),
        (0, {}, {"quantize/mae": 0.01}, ["quantize/mae is 0.01, above 0.01"]),
        (0, {}, {"quantize/zero_point_drift/max": 0.06}, ["quantize/zero_point_drift/max is 0.06, above 0.05"]),
        (0, {"max_drift": 0.1}, {"quantize/zero_point_drift/max": 0.06}, []),
    ],
)
def test_gates(tmp_path: Path, num_lost: int, settings: dict, summary: dict, failed: list[str]):
    before = evaluation(tmp_path, "before", {str(number): True for number in range(100)})
    after = evaluation(tmp_path, "after", {str(number): number >= num_lost for number in range(100)})
    accuracies = [paired_accuracy("heldout", before, after)]
    results = check_gates(QuantizeGatesConfig(**settings), SUMMARY | summary, accuracies)
    assert [result.reason for result in failures(results)] == failed
