"""Alarms: metrics of an iteration that have left the bounds within which training is known to be sound."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from forge_core.settings import Settings


class BoundsConfig(Settings):
    """The range in which a metric belongs; outside of it an alarm is logged and counted."""

    low: float | None = Field(None, description="Smallest value without an alarm")
    high: float | None = Field(None, description="Largest value without an alarm")
    stop: bool = Field(False, description="End the run at this alarm; what has been made stays")

    @model_validator(mode="after")
    def _bounds_something(self) -> BoundsConfig:
        if self.low is None and self.high is None:
            raise ValueError("low and high are both unset; set one of them, or leave the metric out of alarms")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must not be the larger one")
        return self


# Engines that agree differ by about 0.01 nats a token in bfloat16, a KL of 1e-4; weights 0.01 apart make it 0.03.
# In `logprob_gap` and `kl/behavior` is the update's own way as well. A policy without entropy samples nothing new.
DEFAULT_ALARMS = {
    "logprob_gap/mean": BoundsConfig(high=0.15),
    "kl/mismatch": BoundsConfig(high=0.01),
    "kl/behavior": BoundsConfig(high=0.1),
    "entropy/mean": BoundsConfig(low=0.001),
}


class AlarmError(RuntimeError):
    """A metric left bounds that are set to stop the run."""


def find_alarms(metrics: Mapping[str, float], bounds: Mapping[str, BoundsConfig]) -> dict[str, str]:
    """A sentence for each metric outside of its bounds, NaN included, by name; metrics not reported raise none."""
    found = {}
    for name, bound in bounds.items():
        value = metrics.get(name)
        if value is None:
            continue
        low = float("-inf") if bound.low is None else bound.low
        high = float("inf") if bound.high is None else bound.high
        if not low <= value <= high:
            found[name] = f"{name} is {value:.4g}, outside of [{low:g}, {high:g}]"
    return found


def stop_if_asked(alarms: Mapping[str, str], bounds: Mapping[str, BoundsConfig]) -> None:
    """Raise AlarmError when one of the alarms is to end the run."""
    reasons = [sentence for name, sentence in alarms.items() if bounds[name].stop]
    if reasons:
        raise AlarmError(
            f"{'; '.join(reasons)}. Look at the rollouts of this iteration; to go on with the same run_id, widen the "
            "bounds in grpo.alarms or set their stop to false"
        )
