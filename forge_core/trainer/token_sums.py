"""Metrics of a step, summed token by token so that they do not depend on micro-batches or ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TokenSums:
    """Running numbers over the trained tokens of this rank, in float64; `num_tokens` counts those of all ranks."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add one value per trained token, [n]; reported is their mean."""
        _accumulate(self.sums, name, values.detach().double().sum() / self.num_tokens)

    def add_weighted(self, name: str, values: Tensor, weights: Tensor) -> None:
        """Add one value per trained token, [n], times its weight, [n]; reported is the sum."""
        _accumulate(self.sums, name, (values.detach().double() * weights).sum())

    def add_gap(self, name: str, values: Tensor) -> None:
        """Like `add` for values that are not negative; reported as `{name}/mean` and `{name}/max`."""
        self.add(f"{name}/mean", values)
        largest = torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.float64)]).max()
        self.maxima[f"{name}/max"] = torch.maximum(self.maxima.get(f"{name}/max", largest), largest)

    def add_ratio(self, name: str, values: Tensor) -> None:
        """Like `add_gap` for importance weights w, with `{name}/effective_sample_size` = mean(w)^2 / mean(w^2).

        That is the fraction of the tokens (not of the sequences) that equal weights would need for the same variance.
        """
        self.add_gap(name, values)
        _accumulate(self.squares, name, values.detach().double().square().sum() / self.num_tokens)

    def reduce(self) -> dict[str, float]:
        """The numbers over all ranks; a collective call."""
        summed = torch.stack([*self.sums.values(), *self.squares.values()])
        maxima = torch.stack(list(self.maxima.values()))
        if dist.get_world_size() > 1:
            dist.all_reduce(summed)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        metrics = dict(zip(self.sums, summed[: len(self.sums)].tolist(), strict=True))
        for name, square in zip(self.squares, summed[len(self.sums) :].tolist(), strict=True):
            metrics[f"{name}/effective_sample_size"] = metrics[f"{name}/mean"] ** 2 / square if square else 0.0
        return metrics | dict(zip(self.maxima, maxima.tolist(), strict=True))


def _accumulate(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    totals[name] = totals.get(name, 0.0) + value
