"""Estimates with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from forge_core.comparison import paired_difference
from forge_core.estimates import (
    bootstrap_interval,
    majority_vote,
    mean_interval,
    pass_at_k,
    powers_of_two,
    sign_test,
    wilson_interval,
)


def test_pass_at_k_counts_draws_without_replacement():
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    # Of 5 samples 2 are right; two draws miss both in C(3, 2) of C(5, 2) cases: 1 - 3/10.
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="at least 5 samples"):
        pass_at_k(4, 1, 5)


def test_k_goes_in_powers_of_two_up_to_the_number_of_samples():
    assert [powers_of_two(count) for count in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_an_accuracy_has_an_interval_that_is_wide_for_few_problems_and_stays_between_0_and_1():
    assert wilson_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=1e-4)
    assert wilson_interval(20, 20) == pytest.approx((0.8389, 1), abs=1e-4)
    assert (wilson_interval(0, 3)[0], wilson_interval(4, 4)[1]) == (0, 1)  # exactly


def test_a_bootstrap_interval_is_that_of_the_normal_distribution_for_many_problems():
    # Standard deviation of 0, 1/2, 1 in equal parts: sqrt(1/6); of the mean of 300: 0.0236.
    low, high = bootstrap_interval([0.0, 0.5, 1.0] * 100)
    assert low == pytest.approx(0.5 - 1.96 * math.sqrt(1 / 6 / 300), abs=0.004)
    assert high == pytest.approx(0.5 + 1.96 * math.sqrt(1 / 6 / 300), abs=0.004)


def test_an_interval_depends_on_nothing_but_the_scores():
    scores = [0.25, 0.5, 0.5, 1.0]
    assert bootstrap_interval(scores) == bootstrap_interval(scores[::-1])
    assert bootstrap_interval(scores) == bootstrap_interval(scores)


def test_scores_that_are_all_0_or_1_have_an_interval_of_some_width():
    assert mean_interval([1.0] * 20) == wilson_interval(20, 20)
    assert mean_interval([0.5, 1.0]) == bootstrap_interval([0.5, 1.0])


@pytest.mark.parametrize(
    ("answers", "are_right", "expected"),
    [
        (["7", "7", "8"], [True, True, False], (1.0, False, 3)),
        (["7", "8", "8"], [True, False, False], (0.0, False, 3)),
        (["7", "8", None], [True, False, False], (0.5, True, 2)),  # the coin decides
        (["7", "8", "9"], [True, False, False], (1 / 3, True, 3)),
        ([None, None, "7"], [False, False, True], (1.0, False, 1)),  # who says nothing does not vote
        ([None, None, None], [False, False, False], (0.0, False, 0)),
        ([None, None], [True, False], (0.0, False, 0)),  # right for another reason than its answer
    ],
)
def test_a_vote_goes_to_the_most_frequent_answer(answers, are_right, expected):
    assert majority_vote(answers, are_right) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("better", "worse", "p_value"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 32),  # one tail is 1 of 2^5
        (3, 1, 2 * (1 + 4) / 16),
        (1, 3, 2 * (1 + 4) / 16),
        (2, 2, 1.0),
    ],
)
def test_a_sign_test_counts_the_cases_that_are_as_lopsided(better: int, worse: int, p_value: float):
    assert sign_test(better, worse) == pytest.approx(p_value)


def test_a_sign_test_of_many_items_is_neither_slow_nor_out_of_range():
    # (50,500 - 50,000) / sqrt(100,000 / 4), with continuity 499.5 / 158.11 = 3.159: p = 0.00158.
    assert sign_test(50_500, 49_500) == pytest.approx(0.00158, rel=0.01)


def test_a_paired_difference_counts_which_items_changed_sides():
    found = paired_difference([1, 0, 0, 1, 0], [1, 1, 1, 0, 0.0])
    assert (found.num_better, found.num_worse, found.n) == (2, 1, 5)
    assert found.difference == pytest.approx(0.2)
    assert found.p_value == pytest.approx(1.0)  # of 3 that changed, 1 or fewer on one side: 2 * (1 + 3) / 8
    assert str(found).endswith("on 5 items, 2 better and 1 worse (p = 1)")
