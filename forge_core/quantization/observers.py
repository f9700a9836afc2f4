"""What was seen of a layer's inputs, and the range that four observers draw from it.

One pass serves them all. Values are counted by their bfloat16: 65,536 integers that are the same in whatever batches
and order the values come, and fine enough (1 part in 256) for a percentile or a clipping point. torchao's observers are
not used here: its MSE observer decides on the first batch alone and it has no percentile, and their state depends on
the order of the batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_core.quantization.schemes import integer_parameters, integer_range
from forge_core.quantize_config import CalibrationConfig

# The value of each 16-bit pattern, by its unsigned number.
_BFLOAT16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).roll(2**15).view(torch.bfloat16)
_SHRINKS = [1 - 0.01 * step for step in range(91)]


@dataclass
class ActivationStatistics:
    """Everything recorded of the inputs [tokens, channels] of one layer.

    Independent of how they are split into batches, and of their order: counts, minima and maxima exactly, mean and
    standard deviation up to float64 rounding. `average_low` and `average_high` follow the batches and promise neither.
    """

    channel_low: Tensor  # [channels] float32
    channel_high: Tensor  # [channels] float32
    counts: Tensor  # [65536] int64, by bfloat16 pattern
    total: float = 0.0
    total_squares: float = 0.0
    average_low: float = math.nan
    average_high: float = math.nan

    @classmethod
    def empty(cls, num_channels: int) -> ActivationStatistics:
        """Before the first token."""
        return cls(
            channel_low=torch.full((num_channels,), math.inf),
            channel_high=torch.full((num_channels,), -math.inf),
            counts=torch.zeros(2**16, dtype=torch.int64),
        )

    def observe(self, tokens: Tensor, averaging: float = 0.1) -> None:
        """Count a batch [tokens, channels] in; raises ValueError when a number is not finite."""
        tokens = tokens.detach().float().cpu()
        if not tokens.isfinite().all():
            raise ValueError("activations are not finite; the policy or its inputs are broken")
        self.channel_low = torch.minimum(self.channel_low, tokens.amin(0))
        self.channel_high = torch.maximum(self.channel_high, tokens.amax(0))
        patterns = tokens.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
        self.counts += torch.bincount(patterns.flatten(), minlength=2**16)
        self.total += tokens.double().sum().item()
        self.total_squares += tokens.double().square().sum().item()
        low, high = tokens.min().item(), tokens.max().item()
        is_first = math.isnan(self.average_low)
        self.average_low = low if is_first else (1 - averaging) * self.average_low + averaging * low
        self.average_high = high if is_first else (1 - averaging) * self.average_high + averaging * high

    @property
    def num_values(self) -> int:
        """Numbers seen."""
        return int(self.counts.sum())

    @property
    def low(self) -> float:
        """Smallest number seen."""
        return self.channel_low.min().item()

    @property
    def high(self) -> float:
        """Largest number seen."""
        return self.channel_high.max().item()

    @property
    def std(self) -> float:
        """Standard deviation of all numbers seen."""
        mean = self.total / self.num_values
        return math.sqrt(max(0.0, self.total_squares / self.num_values - mean**2))

    @property
    def span_sigmas(self) -> float:
        """Largest less smallest number, in standard deviations; 0 when all are equal."""
        return (self.high - self.low) / self.std if self.std > 0 else 0.0

    def channel_absmax(self) -> Tensor:
        """Largest magnitude of each channel, [channels]."""
        return torch.maximum(self.channel_low.abs(), self.channel_high.abs())


def observed_range(seen: ActivationStatistics, settings: CalibrationConfig, *, symmetric: bool) -> tuple[float, float]:
    """The range [low, high] of a layer's activations by the configured observer."""
    match settings.observer:
        case "minmax":
            return seen.low, seen.high
        case "moving_average":
            return seen.average_low, seen.average_high
        case "percentile":
            return percentile_range(seen, settings.percentile)
        case "mse":
            return mse_range(seen, symmetric=symmetric)


def percentile_range(seen: ActivationStatistics, percentile: float) -> tuple[float, float]:
    """The central range of `percentile` % of all values, to 1 part in 256 and never wider than what was seen."""
    values, counts = _distribution(seen)
    outside = seen.num_values * (1 - percentile / 100) / 2
    cumulative = counts.cumsum(0)
    low = values[int((cumulative > outside).int().argmax())].item()
    high = values[int((cumulative >= seen.num_values - outside).int().argmax())].item()
    return max(low, seen.low), min(high, seen.high)


def mse_range(seen: ActivationStatistics, *, symmetric: bool) -> tuple[float, float]:
    """The shrunk range, of 91 from 100 % to 10 %, whose eight-bit numbers have the least squared error."""
    values, counts = _distribution(seen)
    shrinks = torch.tensor(_SHRINKS)
    lows, highs = seen.low * shrinks, seen.high * shrinks
    scale, zero_point = integer_parameters(lows, highs, bits=8, symmetric=symmetric)
    errors = []
    for one_scale, one_zero in zip(scale, zero_point, strict=True):
        integers = (torch.round(values / one_scale) + one_zero).clamp(*integer_range(8))
        rounded = (integers - one_zero) * one_scale
        errors.append(((rounded - values).double().square() * counts).sum())
    best = int(torch.stack(errors).argmin())
    return lows[best].item(), highs[best].item()


def _distribution(seen: ActivationStatistics) -> tuple[Tensor, Tensor]:
    """Values in ascending order and how often each was seen."""
    present = seen.counts.nonzero().flatten()
    values = _BFLOAT16[present].float()
    order = values.argsort()
    return values[order], seen.counts[present][order]
