"""Two policies judged on the same problems: how far apart they are, and how sure that is.

The problems are drawn again with replacement, the two scores of a problem always together, so what is hard for both
does not widen the interval (paired percentile bootstrap; B. Efron, 1979).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from pydantic import Field

from forge_core import storage
from forge_core.artifacts import Manifest
from forge_core.settings import Settings

CONFIDENCE = 0.95
MAX_DRAWS_AT_ONCE = 4_000_000  # numbers held in memory; what is drawn does not depend on it
MAX_NAMED = 3
_METRICS: dict[str, Callable[[dict], float]] = {
    "accuracy": lambda row: float(row["is_right"]),
    "pass_at_1": lambda row: row["num_right_samples"] / row["num_samples"],
}


class PairedDifference(Settings):
    """Mean scores of A and B over the same items, and B minus A with its 95 % interval."""

    mean_a: float
    mean_b: float
    difference: float = Field(description="mean_b - mean_a: above 0 when B is better")
    low: float = Field(description="Lower end of the interval of the difference")
    high: float = Field(description="Upper end of the interval of the difference")
    n: int = Field(description="Items")

    def __str__(self) -> str:
        return (
            f"{self.mean_a:.4f} -> {self.mean_b:.4f}, difference {self.difference:+.4f} "
            f"[{self.low:+.4f}, {self.high:+.4f}] on {self.n} items"
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
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; use at least 1 (10000 is usual)")
    scores = np.array([a, b], dtype=np.float64)
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite; leave out, on both sides, what could not be scored, and count it")
    differences, count = scores[1] - scores[0], len(a)
    # Equal items are drawn together by how often they occur, which makes a million items as cheap as ten.
    values, counts = np.unique(differences, return_counts=True)
    generator = np.random.default_rng(seed)
    at_once = max(1, MAX_DRAWS_AT_ONCE // len(values))
    sizes = [min(at_once, resamples - done) for done in range(0, resamples, at_once)]
    means = [generator.multinomial(count, counts / count, size=size) @ values / count for size in sizes]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    mean_a, mean_b = scores.mean(axis=1)
    return PairedDifference(
        mean_a=float(mean_a),
        mean_b=float(mean_b),
        difference=float(mean_b - mean_a),
        low=float(low),
        high=float(high),
        n=count,
    )


def compare_evaluations(
    a: Manifest, b: Manifest, *, seed: int = 0, resamples: int = 10_000
) -> dict[str, PairedDifference]:
    """Paired differences of two evaluations by metric: greedy `accuracy`, and `pass_at_1` of the samples.

    Items are matched by example id. Raises ValueError when the two were not made on the same items, with how many are
    in one alone, or when an item has another answer in the other.
    """
    here, there = read_items(a), read_items(b)
    _require_same_items(here, there, a, b)
    return {
        metric: paired_difference(
            [score(here[name]) for name in here], [score(there[name]) for name in here], seed=seed, resamples=resamples
        )
        for metric, score in _METRICS.items()
    }


def read_items(evaluation: Manifest) -> dict[str, dict]:
    """The rows of an evaluation by example id, sorted by it."""
    if evaluation.kind != "eval":
        raise ValueError(f"{evaluation.uri} is of kind {evaluation.kind}; only evaluations can be compared")
    lines = storage.read_bytes(f"{evaluation.files_uri}/samples.jsonl").decode().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["id"]: row for row in sorted(rows, key=lambda row: row["id"])}


def _require_same_items(here: Mapping[str, dict], there: Mapping[str, dict], a: Manifest, b: Manifest) -> None:
    only_a, only_b = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if only_a or only_b:
        raise ValueError(
            f"{a.uri} and {b.uri} were not made on the same items: {len(only_a)} are in the first alone, "
            f"{len(only_b)} in the second, {len(here.keys() & there.keys())} in both "
            f"(e.g. {', '.join([*only_a, *only_b][:MAX_NAMED])}); evaluate both on the same dataset and num_examples"
        )
    changed = [name for name in here if here[name]["answer"] != there[name]["answer"]]
    if changed:
        raise ValueError(
            f"{len(changed)} of {len(here)} items have another answer in {b.uri} than in {a.uri} "
            f"(e.g. {', '.join(changed[:MAX_NAMED])}); evaluate both on the same dataset"
        )
