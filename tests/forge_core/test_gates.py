"""Gates: what passes, what does not, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Manifest
from forge_core.comparison import PairedDifference, paired_difference
from forge_core.config import SftRunConfig
from forge_core.evaluations import compare
from forge_core.gates import GatesConfig, failures, judge
from forge_core.plan import Plan
from tests.pipeline import tiny_config


def difference(low: float) -> PairedDifference:
    return PairedDifference(
        mean_a=0.5, mean_b=0.5, difference=0.0, low=low, high=-low, n=100, num_better=0, num_worse=0, p_value=1.0
    )


def evaluation(tmp_path: Path, name: str, right: dict[str, bool]) -> Manifest:
    (tmp_path / name).mkdir()
    rows = [json.dumps({"id": problem, "is_right": is_right}) + "\n" for problem, is_right in right.items()]
    (tmp_path / name / "samples.jsonl").write_text("".join(rows))
    return artifacts.commit(
        tmp_path / name,
        f"memory://{tmp_path.name}/{name}",
        kind="eval",
        job={"stage": "evaluate"},
        job_digest=name,
        inputs={},
        summary={},
        software={},
        timings={},
    )


def test_gates_that_are_not_set_ask_nothing():
    assert not GatesConfig().are_set
    assert judge(GatesConfig(), {}, {"heldout": difference(-1.0)}) == ()


@pytest.mark.parametrize(("low", "has_passed"), [(-0.02, True), (-0.021, False)])
def test_accuracy_passes_when_even_the_low_end_of_the_interval_is_within_the_bound(low: float, has_passed: bool):
    [result] = judge(GatesConfig(max_accuracy_drop=0.02), {}, {"heldout": difference(low)})
    assert (result.gate, result.value, result.bound) == ("max_accuracy_drop/heldout", low, -0.02)
    assert result.has_passed == has_passed


def test_without_a_champion_accuracy_has_nothing_to_fall_from():
    [result] = judge(GatesConfig(max_accuracy_drop=0.0), {}, {"heldout": None})
    assert result.has_passed
    assert result.reason == "heldout: no champion yet"


def test_each_bound_fails_on_its_side_and_says_gate_value_and_bound():
    gates = GatesConfig(max_truncated_fraction=0.1, max_kl_to_reference=0.5, min_entropy=0.1, max_logprob_gap=0.05)
    inside = {
        "eval/heldout/truncated_fraction": 0.1,
        "kl/reference": 0.5,
        "entropy/mean": 0.1,
        "logprob_gap/mean": 0.05,
    }
    assert failures(judge(gates, inside, {"heldout": None})) == ()
    outside = {
        "eval/heldout/truncated_fraction": 0.11,
        "kl/reference": float("nan"),
        "entropy/mean": 0.09,
    }
    assert [result.reason for result in failures(judge(gates, outside, {"heldout": None}))] == [
        "eval/heldout/truncated_fraction is 0.11, above 0.1",
        "kl/reference is nan, above 0.5",
        "entropy/mean is 0.09, below 0.1",
        "logprob_gap/mean was not reported; the bound is 0.05",
    ]


def test_a_paired_difference_knows_less_than_its_parts_vary():
    # b is right wherever a is, and on 10 of 100 more: every resample has a mean difference of 0.1 give or take 0.03.
    a = [1.0] * 50 + [0.0] * 50
    b = [1.0] * 60 + [0.0] * 40
    found = paired_difference(a, b)
    assert (found.mean_a, found.mean_b, found.n) == (0.5, 0.6, 100)
    assert found.difference == pytest.approx(0.1)
    # Binomial: 1.96 * sqrt(0.1 * 0.9 / 100) = 0.059; unpaired it would be 0.137.
    assert found.low == pytest.approx(0.041, abs=0.012)
    assert found.high == pytest.approx(0.159, abs=0.012)
    assert paired_difference(a, b) == found


def test_two_evaluations_are_paired_by_problem_and_not_by_place(tmp_path: Path):
    first = evaluation(tmp_path, "first", {"a": True, "b": False, "c": True})
    second = evaluation(tmp_path, "second", {"c": True, "a": True, "b": False})
    found = compare(first, second)["accuracy"]
    assert (found.difference, found.low, found.high) == (0, 0, 0)


def test_evaluations_on_other_problems_are_not_compared(tmp_path: Path):
    first = evaluation(tmp_path, "first", {"a": True, "b": False})
    second = evaluation(tmp_path, "second", {"a": True, "c": False})
    with pytest.raises(ValueError, match="do not have the same problems: 1 and 1 are in one alone, 1 in both"):
        compare(first, second)


def test_a_report_that_was_altered_is_not_believed(tmp_path: Path):
    first = evaluation(tmp_path, "first", {"a": True})
    storage.write_atomic(f"{first.files_uri}/samples.jsonl", b'{"id": "a", "is_right": false}\n')
    with pytest.raises(ArtifactError, match="does not have the SHA-256"):
        compare(first, first)


def test_a_gate_on_what_a_run_does_not_measure_is_refused_before_it_starts(tmp_path: Path):
    config = tiny_config(str(tmp_path), gates=GatesConfig(max_kl_to_reference=0.5))
    with pytest.raises(ValueError, match=r"gates.max_kl_to_reference is 0.5, which this run does not .* grpo.kl"):
        Plan(config, "run").check()
    config = SftRunConfig(root=str(tmp_path), gates=GatesConfig(min_entropy=0.1))
    with pytest.raises(ValueError, match=r"gates.min_entropy is 0.1, which this run does not measure; leave it out$"):
        Plan(config, "run").check()
