"""The gates between a quantized policy and its publication, from numbers that stand in manifests."""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.artifacts import Manifest
from forge_core.evaluations import compare
from forge_core.quantize_config import QuantizeGatesConfig
from forge_core.settings import Settings


class PairedAccuracy(Settings):
    """Accuracy of two policies on the same problems, greedy answers."""

    name: str
    before: float
    after: float
    drop: float
    drop_low: float  # 95 % interval of the drop: paired bootstrap over problems
    drop_high: float
    num_lost: int  # right before, wrong after
    num_gained: int
    num_examples: int

    @property
    def metrics(self) -> dict[str, float | int]:
        """Under their tracking names."""
        fields = ("drop", "drop_low", "drop_high", "num_lost", "num_gained")
        return {f"quantize/accuracy/{self.name}/{field}": getattr(self, field) for field in fields}


class Gate(Settings):
    """One condition and how it turned out."""

    name: str
    value: float
    bound: float
    is_passed: bool

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.4g}, {'within' if self.is_passed else 'above'} {self.bound:g}"


def paired_accuracy(name: str, before: Manifest, after: Manifest) -> PairedAccuracy:
    """Compare two evaluations problem by problem; raises ValueError when they are not of the same problems."""
    found = compare(before, after)["accuracy"]
    return PairedAccuracy(
        name=name,
        before=found.mean_a,
        after=found.mean_b,
        drop=0 - found.difference,
        drop_low=0 - found.high,
        drop_high=0 - found.low,
        num_lost=found.num_worse,
        num_gained=found.num_better,
        num_examples=found.n,
    )


def check_gates(
    settings: QuantizeGatesConfig, summary: dict[str, float | int], accuracies: Sequence[PairedAccuracy]
) -> list[Gate]:
    """Every gate; that of the drift only where there was a calibration to compare with."""
    gates = [_gate("quantize/mae", summary["quantize/mae"], settings.max_mae)]
    for one in accuracies:
        value = one.drop_high if settings.require_confidence else one.drop
        label = "upper end of the accuracy drop" if settings.require_confidence else "accuracy drop"
        gates.append(_gate(f"{label} on {one.name}", value, settings.max_accuracy_drop, is_included=True))
    if "quantize/zero_point_drift/max" in summary:
        gates.append(
            _gate("quantize/zero_point_drift/max", summary["quantize/zero_point_drift/max"], settings.max_drift)
        )
    return gates


def _gate(name: str, value: float, bound: float, *, is_included: bool = False) -> Gate:
    # A little more than the bound is rounding: 0.82 - 0.80 is not exactly 0.02.
    is_passed = value <= bound + 1e-9 if is_included else value < bound
    return Gate(name=name, value=value, bound=bound, is_passed=is_passed)
