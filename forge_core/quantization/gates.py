"""The gates between a quantized policy and its publication, from numbers that stand in manifests."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

from forge_core.artifacts import ArtifactError, Manifest
from forge_core.gates import GateResult
from forge_core.manifests import file_reader
from forge_core.quantize_config import QuantizeGatesConfig
from forge_core.settings import Settings


class PairedAccuracy(Settings):
    """Accuracy of two policies on the same problems, greedy answers."""

    name: str
    before: float
    after: float
    drop: float
    drop_low: float  # 95 % interval of the drop, from the differences by problem
    drop_high: float
    num_lost: int  # right before, wrong after
    num_gained: int
    num_examples: int

    @property
    def metrics(self) -> dict[str, float | int]:
        """Under their tracking names."""
        fields = ("drop", "drop_low", "drop_high", "num_lost", "num_gained")
        return {f"quantize/accuracy/{self.name}/{field}": getattr(self, field) for field in fields}


def paired_accuracy(name: str, before: Manifest, after: Manifest) -> PairedAccuracy:
    """Compare two evaluations problem by problem; raises ArtifactError when they are not of the same problems."""
    first, second = _verdicts(before), _verdicts(after)
    if first.keys() != second.keys():
        raise ArtifactError(f"{before.uri} and {after.uri} are of different problems and cannot be compared")
    pairs = [(first[problem], second[problem]) for problem in first]
    differences = [int(one) - int(other) for one, other in pairs]
    drop = statistics.fmean(differences)
    # Of paired differences, which is narrower than that of two accuracies: most problems are easy or hard for both.
    reach = 1.96 * statistics.stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    return PairedAccuracy(
        name=name,
        before=statistics.fmean(one for one, _ in pairs),
        after=statistics.fmean(other for _, other in pairs),
        drop=drop,
        drop_low=drop - reach,
        drop_high=drop + reach,
        num_lost=differences.count(1),
        num_gained=differences.count(-1),
        num_examples=len(pairs),
    )


def _verdicts(evaluation: Manifest) -> dict[str, bool]:
    rows = [json.loads(line) for line in file_reader(evaluation, "samples.jsonl")().splitlines()]
    return {row["id"]: row["is_right"] for row in rows}


def check_gates(
    settings: QuantizeGatesConfig, summary: dict[str, float | int], accuracies: Sequence[PairedAccuracy]
) -> tuple[GateResult, ...]:
    """How it fares at every gate; that of the drift only where there was a calibration to compare with."""
    results = [_gate("max_mae", "quantize/mae", summary["quantize/mae"], settings.max_mae)]
    for one in accuracies:
        value = one.drop_high if settings.require_confidence else one.drop
        gate = f"max_accuracy_drop/{one.name}"
        label = "upper end of the accuracy drop" if settings.require_confidence else "accuracy drop"
        results.append(_gate(gate, f"{label} on {one.name}", value, settings.max_accuracy_drop, is_included=True))
    drift = "quantize/zero_point_drift/max"
    if drift in summary:
        results.append(_gate("max_drift", drift, summary[drift], settings.max_drift))
    return tuple(results)


def _gate(gate: str, name: str, value: float, bound: float, *, is_included: bool = False) -> GateResult:
    # A little more than the bound is rounding: 0.82 - 0.80 is not exactly 0.02.
    has_passed = value <= bound + 1e-9 if is_included else value < bound
    reason = f"{name} is {value:.4g}, {'within' if has_passed else 'above'} {bound:g}"
    return GateResult(gate=gate, value=value, bound=bound, has_passed=has_passed, reason=reason)
