"""The batch behind the golden numbers, on which verl, TRL, OpenRLHF, slime, AReaL and NeMo-RL agree."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = torch.tensor([5, 3, 4, 1, 5, 2, 5, 4])
REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
# (R - mean) / (std + 1e-6) of REWARDS by group.
ADVANTAGES = torch.tensor([0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, 1.499997, -0.499999])
MASK = torch.arange(5) < LENGTHS[:, None]  # [8, 5]
SEQUENCE_IDS = torch.where(MASK, torch.arange(8)[:, None], -1)


def logprobs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(old, new, ref, rollout), each [8, 5]."""
    generator = torch.Generator().manual_seed(1234)
    old = -torch.rand(8, 5, generator=generator) * 2 - 0.1
    new = old + (torch.rand(8, 5, generator=generator) - 0.5) * 0.8
    ref = old + (torch.rand(8, 5, generator=generator) - 0.5) * 0.4
    rollout = old + (torch.rand(8, 5, generator=generator) - 0.5) * 1.0
    return old, new, ref, rollout
