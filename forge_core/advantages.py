"""Advantages: rewards of the completions of one prompt -> how much better each is than its group, [G] -> [G]."""

from __future__ import annotations

import torch
from torch import Tensor


def group_zscore(rewards: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """(R - mean) / (std + epsilon) with Bessel's correction; exactly 0 when all rewards are equal.

    GRPO (arXiv:2402.03300). Equality is tested on the rewards: (R - mean) of equal float32 values is rounding noise
    that a small std would blow up.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)


def group_mean(rewards: Tensor) -> Tensor:
    """R - mean, not divided by the spread (Dr. GRPO, arXiv:2503.20783)."""
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the *other* completions of the group (RLOO, arXiv:2402.14740); needs two or more."""
    if len(rewards) < 2:
        raise ValueError("leave_one_out needs at least 2 completions in a group; raise grpo.group_size")
    return group_mean(rewards) * len(rewards) / (len(rewards) - 1)


def advantages_by_group(rewards: Tensor, group_ids: Tensor, advantage) -> tuple[Tensor, Tensor]:
    """Advantages [N] and keep mask [N] of rewards [N], group by group.

    Groups are found by id, never by stride. A NaN reward (could not be scored) is left out of its group's statistics
    and of training; a group with a single valid reward, or with equal ones, has nothing to teach and is not kept.
    """
    result = torch.zeros_like(rewards)
    keep = torch.zeros(len(rewards), dtype=torch.bool)
    for group in group_ids.unique():
        members = ((group_ids == group) & ~rewards.isnan()).nonzero().squeeze(1)
        if len(members) < 2:
            continue
        result[members] = advantage(rewards[members])
        keep[members] = rewards[members].max() != rewards[members].min()
    return result, keep
