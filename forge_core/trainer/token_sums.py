"""Metrics of a step, summed token by token so that they do not depend on micro-batches or ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class TokenSums:
    """Running sums over the trained tokens of this rank, in float64."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add one value per trained token, [n]."""
        self.sums[name] = self.sums.get(name, 0.0) + values.detach().double().sum()

    def add_gap(self, name: str, values: Tensor) -> None:
        """Like `add`, and keep the largest value too: reported as `{name}/mean` and `{name}/max`."""
        self.add(f"{name}/mean", values)
        largest = torch.cat([values.detach().double(), values.new_zeros(1, dtype=torch.float64)]).max()
        self.maxima[f"{name}/max"] = torch.maximum(self.maxima.get(f"{name}/max", largest), largest)

    def means(self, num_tokens: int) -> dict[str, float]:
        """Sums over all ranks divided by `num_tokens`, and maxima over all ranks; a collective call."""
        sums, maxima = torch.stack(list(self.sums.values())), torch.stack(list(self.maxima.values()))
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        means = dict(zip(self.sums, (sums / num_tokens).tolist(), strict=True))
        return means | dict(zip(self.maxima, maxima.tolist(), strict=True))
