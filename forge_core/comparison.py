"""Two policies judged on the same problems: how far apart they are, and how sure that is.

The problems are drawn again with replacement, the two scores of a problem always together, so what is hard for both
does not widen the interval (paired percentile bootstrap; B. Efron, 1979).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from forge_core.estimates import bootstrap_interval, sign_test
from forge_core.settings import Settings


class PairedDifference(Settings):
    """Mean scores of A and B over the same items, and B minus A with its 95 % interval."""

    mean_a: float
    mean_b: float
    difference: float = Field(description="mean_b - mean_a: above 0 when B is better")
    low: float = Field(description="Lower end of the interval of the difference")
    high: float = Field(description="Upper end of the interval of the difference")
    n: int = Field(description="Items")
    num_better: int = Field(description="Items on which B scores higher")
    num_worse: int = Field(description="Items on which B scores lower")
    p_value: float = Field(description="Two-sided exact sign test: chance of such a lead if neither were better")

    def __str__(self) -> str:
        return (
            f"{self.mean_a:.4f} -> {self.mean_b:.4f}, difference {self.difference:+.4f} "
            f"[{self.low:+.4f}, {self.high:+.4f}] on {self.n} items, {self.num_better} better and {self.num_worse} "
            f"worse (p = {self.p_value:.2g})"
        )


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, resamples: int = 10_000
) -> PairedDifference:
    """How much higher B scores than A on the same items, `a[i]` and `b[i]` being the scores of item i.

    A pure function of its arguments. Raises ValueError for different lengths, for no items and for NaN.
    """
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} scores and b has {len(b)}; give both scores of every item")
    if len(a) == 0:
        raise ValueError("there are no items to compare; give at least one score on either side")
    scores = np.array([a, b], dtype=np.float64)
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite; leave out, on both sides, what could not be scored, and count it")
    differences = scores[1] - scores[0]
    num_better, num_worse = int((differences > 0).sum()), int((differences < 0).sum())
    low, high = bootstrap_interval(differences.tolist(), seed=seed, resamples=resamples)
    mean_a, mean_b = scores.mean(axis=1)
    return PairedDifference(
        mean_a=float(mean_a),
        mean_b=float(mean_b),
        difference=float(mean_b - mean_a),
        low=low,
        high=high,
        n=len(a),
        num_better=num_better,
        num_worse=num_worse,
        p_value=sign_test(num_better, num_worse),
    )
