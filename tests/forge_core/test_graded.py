"""Metrics of graded problems, and accuracy by difficulty."""

from __future__ import annotations

import pytest

from forge_core.difficulty import by_difficulty
from forge_core.graded import GradedCompletion, GradedProblem, describe


def completion(text: str, *, right: bool = False, length: int = 3, reason: str = "stop", declared: int = 1) -> dict:
    return {
        "completion": text,
        "is_right": right,
        "reward": float(right),
        "extracted": text or None,
        "num_declared": declared,
        "finish_reason": reason,
        "num_tokens": length,
    }


def problem(name: str, answer: dict, *samples: dict, difficulty=None) -> GradedProblem:
    graded = tuple(GradedCompletion(**sample) for sample in samples)
    return GradedProblem(id=name, answer="7", difficulty=difficulty, samples=graded, **answer)


RIGHT, WRONG = completion("7", right=True), completion("8")


def test_metrics_of_two_problems():
    problems = [
        problem("a", RIGHT, RIGHT, WRONG, completion("8", length=8, reason="length"), completion("", length=0)),
        problem("b", completion("8 or 9", declared=2), RIGHT, RIGHT, RIGHT, completion("7.0", right=True)),
    ]
    found = describe(problems, votes=True)
    assert (found["accuracy"], found["num_examples"]) == (0.5, 2)
    assert found["pass_at_1"] == (1 / 4 + 1) / 2
    # Of 4 samples 1 is right: two draws have it in half of the cases.
    assert (found["pass_at_2_of_4"], found["pass_at_4_of_4"]) == (0.75, 1.0)
    assert found["pass_at_2_of_4_low"] <= 0.75 <= found["pass_at_2_of_4_high"]
    # a: 8 has two votes of three. b: 7 has three of four.
    assert (found["majority_at_4"], found["majority_tied_fraction"]) == (0.5, 0.0)
    assert found["unparsable_fraction"] == 1 / 8
    assert (found["truncated_fraction"], found["sampled_truncated_fraction"]) == (0.0, 1 / 8)
    assert (found["multi_answer_fraction"], found["sampled_multi_answer_fraction"]) == (0.5, 0.0)
    assert (found["completion_length"], found["sampled_completion_length"]) == (3, (3 + 3 + 8 + 0 + 4 * 3) / 8)
    assert found["sampled_distinct_fraction"] == (3 + 2) / 8  # "7", "8", "" and "7", "7.0"


def test_without_a_way_to_find_answers_there_is_no_vote():
    assert not [name for name in describe([problem("a", RIGHT, WRONG)], votes=False) if "majority" in name]


def test_of_one_sample_pass_at_1_has_both_names():
    found = describe([problem("a", RIGHT, WRONG), problem("b", RIGHT, RIGHT)], votes=True)
    assert found["pass_at_1"] == found["pass_at_1_of_1"] == 0.5


def test_every_value_of_a_difficulty_is_a_bin():
    problems = [
        problem("a", RIGHT, RIGHT, difficulty="Level 1"),
        problem("b", WRONG, RIGHT, difficulty="Level 1"),
        problem("c", WRONG, WRONG, difficulty="Level 2"),
        problem("d", RIGHT, WRONG),
    ]
    bins = {one.label: one for one in by_difficulty(problems)}
    assert {label: (one.num_examples, one.accuracy, one.pass_at_1) for label, one in bins.items()} == {
        "Level_1": (2, 0.5, 1.0),
        "Level_2": (1, 0.0, 0.0),
        "unknown": (1, 1.0, 0.0),
    }
    assert bins["Level_1"].low == "Level 1"
    assert bins["Level_1"].metrics["difficulty/Level_1/accuracy"] == 0.5


def test_many_numbers_are_put_into_quartiles_and_equal_ones_into_the_same():
    numbers = [1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    problems = [problem(str(place), RIGHT, RIGHT, difficulty=number) for place, number in enumerate(numbers)]
    # Quartiles of these twelve: 1, 3.5 and 6.25.
    assert [(one.label, one.low, one.high, one.num_examples) for one in by_difficulty(problems)] == [
        ("q1", 1, 1, 4),
        ("q2", 2, 3, 2),
        ("q3", 4, 6, 3),
        ("q4", 7, 9, 3),
    ]


def test_a_few_numbers_are_a_bin_each_also_when_written_as_texts():
    problems = [problem(str(place), RIGHT, RIGHT, difficulty=value) for place, value in enumerate([3, "3", 1.5])]
    assert [(one.label, one.num_examples) for one in by_difficulty(problems)] == [("1.5", 1), ("3", 2)]


def test_without_difficulties_there_are_no_bins_and_texts_of_all_kinds_are_refused():
    assert by_difficulty([problem("a", RIGHT, RIGHT)]) == ()
    many = [problem(str(place), RIGHT, RIGHT, difficulty=f"text {place}") for place in range(21)]
    with pytest.raises(ValueError, match="21 different texts"):
        by_difficulty(many)
