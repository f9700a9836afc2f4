"""Gates: what a policy must show before it takes the champion's place. All of it is read from manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from forge_core.settings import Settings

if TYPE_CHECKING:
    from forge_core.comparison import PairedDifference


class GatesConfig(Settings):
    """Bounds that a policy must keep to be published; one that is unset is not looked at."""

    max_accuracy_drop: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="How far accuracy may fall below the champion's on the same problems, e.g. 0.02: the lower end of "
        "the 95 % interval of the difference must not be below minus this; for every evaluation of the config",
    )
    max_truncated_fraction: float | None = Field(
        None, ge=0, le=1, description="Largest share of greedy answers cut at the token limit, in every evaluation"
    )
    max_kl_to_reference: float | None = Field(
        None, ge=0, description="Largest KL to the reference policy in the last update, nats a token; needs grpo.kl"
    )
    min_entropy: float | None = Field(None, ge=0, description="Smallest entropy in the last update, nats a token")
    max_logprob_gap: float | None = Field(
        None, ge=0, description="Largest mean gap of log-probs between generator and trainer in the last update"
    )

    wait_for_approval_seconds: int | None = Field(
        None,
        gt=0,
        description="Wait so long, after the gates, for a person to press Resume in the Prefect UI; then the run fails "
        "and can be retried. Unset, a policy that passes the gates is published at once",
    )

    @property
    def are_set(self) -> bool:
        """Whether a policy is measured at all."""
        bounds = self.model_dump(exclude={"wait_for_approval_seconds"})
        return any(value is not None for value in bounds.values())


class GateResult(Settings):
    """One gate, and how a policy fared at it."""

    gate: str = Field(description="Name of the setting, with the evaluation where there may be several")
    value: float | None = Field(description="None: what the gate looks at was not reported, or there is no champion")
    bound: float
    has_passed: bool
    reason: str = Field(description="One sentence for people")


# Setting, metric of the last update, and whether the metric may not be above the bound or not below it.
_OF_THE_UPDATE = (
    ("max_kl_to_reference", "kl/reference", "above"),
    ("min_entropy", "entropy/mean", "below"),
    ("max_logprob_gap", "logprob_gap/mean", "above"),
)


def judge(
    gates: GatesConfig, numbers: Mapping[str, float], versus_champion: Mapping[str, PairedDifference | None]
) -> tuple[GateResult, ...]:
    """How a policy fares at every gate that is set.

    `numbers` are the summaries of its manifest and its evaluations; `versus_champion` has, for each
    evaluation, its accuracy minus the champion's; None where there is no champion yet.
    """
    found = []
    for name, difference in versus_champion.items():
        if gates.max_accuracy_drop is not None:
            found.append(_accuracy(name, difference, gates.max_accuracy_drop))
        if gates.max_truncated_fraction is not None:
            metric = f"eval/{name}/truncated_fraction"
            found.append(_bounded("max_truncated_fraction", metric, numbers, gates.max_truncated_fraction, "above"))
    for setting, metric, wrong_side in _OF_THE_UPDATE:
        if (bound := getattr(gates, setting)) is not None:
            found.append(_bounded(setting, metric, numbers, bound, wrong_side))
    return tuple(found)


def failures(results: tuple[GateResult, ...]) -> tuple[GateResult, ...]:
    """The gates that were not passed."""
    return tuple(result for result in results if not result.has_passed)


def _accuracy(name: str, difference: PairedDifference | None, bound: float) -> GateResult:
    gate = f"max_accuracy_drop/{name}"
    if difference is None:
        return GateResult(gate=gate, value=None, bound=bound, has_passed=True, reason=f"{name}: no champion yet")
    has_passed = difference.low >= -bound
    reason = (
        f"{name}: accuracy {difference.mean_b:.3f} against the champion's {difference.mean_a:.3f} on the same "
        f"{difference.n} problems, difference {difference.difference:+.3f} [{difference.low:+.3f}, "
        f"{difference.high:+.3f}], " + ("not" if has_passed else "which may be") + f" below {0 - bound:g}"
    )
    return GateResult(gate=gate, value=difference.low, bound=-bound, has_passed=has_passed, reason=reason)


def _bounded(setting: str, metric: str, numbers: Mapping[str, float], bound: float, wrong_side: str) -> GateResult:
    gate = f"{setting}/{metric.split('/')[1]}" if metric.startswith("eval/") else setting
    value = numbers.get(metric)
    if value is None:
        reason = f"{metric} was not reported; the bound is {bound:g}"
        return GateResult(gate=gate, value=None, bound=bound, has_passed=False, reason=reason)
    # Written so that NaN passes neither.
    has_passed = value <= bound if wrong_side == "above" else value >= bound
    reason = f"{metric} is {value:.4g}, " + (f"not {wrong_side}" if has_passed else wrong_side) + f" {bound:g}"
    return GateResult(gate=gate, value=value, bound=bound, has_passed=has_passed, reason=reason)
