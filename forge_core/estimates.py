"""What graded samples say about a policy, and how sure that is. Pure arithmetic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
Z = 1.959964  # the normal distribution has CONFIDENCE within so many standard deviations
MAX_DRAWS_AT_ONCE = 4_000_000  # numbers held in memory; what is drawn does not depend on it


class Interval(NamedTuple):
    """Where a mean lies with 95 % confidence."""

    low: float
    high: float


class Vote(NamedTuple):
    """The outcome of a vote among the answers to one problem."""

    share_right: float  # 1 or 0; in between when answers are tied, or when one answer was graded both ways
    is_tied: bool
    num_votes: int


def wilson_interval(num_right: int, count: int) -> Interval:
    """Where the true accuracy lies with 95 % confidence (E. B. Wilson, 1927); never outside of [0, 1]."""
    accuracy = num_right / count
    centre = (accuracy + Z**2 / (2 * count)) / (1 + Z**2 / count)
    reach = Z / (1 + Z**2 / count) * math.sqrt(accuracy * (1 - accuracy) / count + Z**2 / (4 * count**2))
    # By rounding alone, 0 of 3 would lie outside of its own interval.
    return Interval(max(0.0, min(accuracy, centre - reach)), min(1.0, max(accuracy, centre + reach)))


def bootstrap_interval(values: Sequence[float], *, seed: int = 0, resamples: int = 10_000) -> Interval:
    """Where the mean over all problems like these lies: percentile bootstrap over problems (B. Efron, 1979).

    A pure function of its arguments. Raises ValueError without resamples.
    """
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; use at least 1 (10000 is usual)")
    # Equal values are drawn together by how often they occur, which makes a million items as cheap as ten.
    distinct, counts = np.unique(np.array(values, dtype=np.float64), return_counts=True)
    generator, count = np.random.default_rng(seed), len(values)
    at_once = max(1, MAX_DRAWS_AT_ONCE // len(distinct))
    sizes = [min(at_once, resamples - done) for done in range(0, resamples, at_once)]
    means = [generator.multinomial(count, counts / count, size=size) @ distinct / count for size in sizes]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(low), float(high))


def mean_interval(values: Sequence[float]) -> Interval:
    """Interval of the mean of scores in [0, 1], one a problem.

    Wilson's where every problem is wholly right or wrong, since a bootstrap of equal values has no width at all; a
    bootstrap over problems otherwise.
    """
    if all(value in (0, 1) for value in values):
        return wilson_interval(int(sum(values)), len(values))
    return bootstrap_interval(values)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased chance that one of k draws is right, 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374); needs n >= k."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest` itself: the k of pass@k."""
    return sorted({2**power for power in range(largest.bit_length())} | {largest})


def majority_vote(answers: Sequence[str | None], are_right: Sequence[bool]) -> Vote:
    """How right the most frequent answer is; None abstains, and a vote without votes is wrong.

    Among tied answers one is drawn at random, so the vote counts as the share of them that is right.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Vote(share_right=0.0, is_tied=False, num_votes=0)
    most = max(votes.values())
    winners = {answer for answer, count in votes.items() if count == most}
    graded = [is_right for answer, is_right in zip(answers, are_right, strict=True) if answer in winners]
    return Vote(share_right=sum(graded) / len(graded), is_tied=len(winners) > 1, num_votes=votes.total())


def sign_test(num_better: int, num_worse: int) -> float:
    """Two-sided p-value of so many items better and worse if both were equally likely; 1 when there are none.

    Exact; for items that are right or wrong it is McNemar's exact test (Q. McNemar, 1947).
    """
    count, fewer = num_better + num_worse, min(num_better, num_worse)
    # By logarithms: the binomial coefficients of many items are numbers of many digits.
    logs = (math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in range(fewer + 1))
    return min(1.0, 2 * math.fsum(math.exp(log - count * math.log(2)) for log in logs))
