"""Two policies on the same problems: how far apart they are, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 2**22  # resampled values at once


@dataclass(frozen=True)
class PairedDifference:
    """Mean of a minus mean of b over the same items, with its 95 % interval."""

    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    n: int


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, resamples: int = 10_000
) -> PairedDifference:
    """How far a is above b, item by item, with the percentile bootstrap interval over items (Efron, 1979).

    Raises ValueError when the items are none or not the same number.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"a has {len(a)} values and b has {len(b)}; a paired comparison needs the same items in both")
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    differences = first - second  # [n]
    generator, means = np.random.default_rng(seed), []
    rows = max(1, _CHUNK // len(differences))
    for begin in range(0, resamples, rows):
        chosen = generator.integers(len(differences), size=(min(rows, resamples - begin), len(differences)))
        means.append(differences[chosen].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return PairedDifference(
        mean_a=float(first.mean()),
        mean_b=float(second.mean()),
        difference=float(differences.mean()),
        low=float(low),
        high=float(high),
        n=len(differences),
    )
