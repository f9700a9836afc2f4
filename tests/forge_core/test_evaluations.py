"""Stored evaluations, compared by every score they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core import artifacts
from forge_core.artifacts import Manifest
from forge_core.evaluations import compare, setting_differences


def evaluation(tmp_path: Path, name: str, rows: list[dict], *, votes: bool = True, **settings) -> Manifest:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return artifacts.commit(
        directory,
        (tmp_path / "store" / name).as_uri(),
        kind="eval",
        job={"stage": "evaluate", "evaluation": {"name": "heldout", "max_tokens": 16} | settings},
        job_digest=name,
        inputs={},
        summary={"eval/heldout/majority_at_4": 0.5} if votes else {},
        software={},
        timings={},
    )


def row(name: str, is_right: bool, samples: str, answer: str = "7") -> dict:
    """A problem whose samples are given as the answers they give; 7 is right, a dash is none."""
    graded = [{"is_right": text == "7", "extracted": None if text == "-" else text} for text in samples]
    return {"id": name, "answer": answer, "is_right": is_right, "samples": graded}


A = [row("p", False, "7888"), row("q", True, "7777"), row("r", False, "8-9-")]
B = [row("r", True, "7--8"), row("q", True, "7777"), row("p", True, "7778")]


def test_two_evaluations_are_compared_by_greedy_answers_samples_and_votes(tmp_path: Path):
    found = compare(evaluation(tmp_path, "a", A), evaluation(tmp_path, "b", B))
    assert list(found) == ["accuracy", "pass_at_1", "majority"]
    accuracy, pass_at_1, majority = found.values()
    assert (accuracy.mean_a, accuracy.mean_b) == pytest.approx((1 / 3, 1))
    assert (accuracy.num_better, accuracy.num_worse, accuracy.p_value) == (2, 0, 0.5)
    # p 1/4 -> 3/4, q 1 -> 1, r 0 -> 1/4
    assert pass_at_1.difference == pytest.approx((2 / 4 + 0 + 1 / 4) / 3)
    # p 0 -> 1, q 1 -> 1, r 0 -> a tie of 7 and 8
    assert (majority.mean_a, majority.mean_b) == pytest.approx((1 / 3, 2.5 / 3))


def test_without_votes_on_either_side_majorities_are_not_compared(tmp_path: Path):
    found = compare(evaluation(tmp_path, "a", A), evaluation(tmp_path, "b", B, votes=False))
    assert list(found) == ["accuracy", "pass_at_1"]


def test_problems_whose_right_answer_has_changed_are_other_problems(tmp_path: Path):
    changed = [*B[:2], row("p", True, "7778", answer="8")]
    with pytest.raises(ValueError, match=r"1 of 3 problems have another answer in .*\(e.g. p\)"):
        compare(evaluation(tmp_path, "a", A), evaluation(tmp_path, "b", changed))


def test_settings_that_differ_are_named(tmp_path: Path):
    first, second = evaluation(tmp_path, "a", A), evaluation(tmp_path, "b", B, max_tokens=32)
    assert setting_differences(first, second) == ["evaluation.max_tokens (16 there, 32 here)"]
    assert setting_differences(first, first) == []
