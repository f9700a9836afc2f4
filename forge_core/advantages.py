"""Advantages: how much better each completion is than what it is compared with.

Most compare the completions of one prompt and map the rewards of a group to its advantages, [G] -> [G]. One that needs
the whole batch (its spread, its reward functions one by one) says so by the type of its argument:

    def within_group(rewards: Tensor, **settings) -> Tensor           # [G] -> [G]
    def over_batch(inputs: AdvantageInputs, **settings) -> Tensor     # -> [N]

Samples whose reward is NaN (could not be scored) never reach either kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage over the whole batch may look at: N scored completions and K reward functions."""

    rewards: Tensor  # [N, K] float32, by reward function
    weights: Tensor  # [K] float32, of the reward functions
    total: Tensor  # [N] float32, the weighted sum, overlong penalty included
    group_ids: Tensor  # [N] int64
    lengths: Tensor  # [N] int64, completion tokens


Advantage = Callable[..., Tensor]


def group_zscore(rewards: Tensor, *, epsilon: float = EPSILON) -> Tensor:
    """(R - mean) / (std + epsilon) with Bessel's correction; exactly 0 when all rewards are equal, [G] -> [G].

    GRPO (arXiv:2402.03300). Equality is tested on the rewards: (R - mean) of equal float32 values is rounding noise
    that a small std would blow up.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)


def group_mean(rewards: Tensor) -> Tensor:
    """R - mean, not divided by the spread (Dr. GRPO, arXiv:2503.20783), [G] -> [G]."""
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the *other* completions of the group (RLOO, arXiv:2402.14740), [G] -> [G].

    Raises ValueError for a group of one.
    """
    if len(rewards) < 2:
        raise ValueError("leave_one_out needs at least 2 completions in a group; raise grpo.group_size")
    return group_mean(rewards) * len(rewards) / (len(rewards) - 1)


def batch_std(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Tensor:
    """(R - group mean) / (std of all rewards + epsilon), [N] (LitePPO, arXiv:2508.08221)."""
    centred = by_group(inputs.total, inputs.group_ids, group_mean)
    return centred / (_std(inputs.total, torch.ones_like(inputs.total)) + epsilon)


def reinforce_pp(inputs: AdvantageInputs, *, epsilon: float = 1e-8) -> Tensor:
    """Rewards whitened over the tokens of the batch, without groups, [N] (REINFORCE++, arXiv:2501.03262).

    The return of a token is the reward of its completion: the discount is 1.
    """
    return _whitened(inputs.total, inputs.lengths, epsilon)


def reinforce_pp_baseline(inputs: AdvantageInputs, *, epsilon: float = 1e-8) -> Tensor:
    """(R - group mean) whitened over the tokens of the batch, [N] (REINFORCE++ with baseline, arXiv:2501.03262).

    Exactly 0 in a group of equal rewards, where the shift by the batch's mean would make up a preference.
    """
    centred = by_group(inputs.total, inputs.group_ids, group_mean)
    return torch.where(
        has_spread(inputs.total[:, None], inputs.group_ids), _whitened(centred, inputs.lengths, epsilon), 0.0
    )


def gdpo(inputs: AdvantageInputs, *, epsilon: float = EPSILON) -> Tensor:
    """Each reward function's `group_zscore`, weighted, summed, and whitened over the batch, [N] (arXiv:2601.05242).

    Functions of different scale keep their say, and different combinations of rewards their difference. Exactly 0 in a
    group in which every function gives equal rewards. An overlong penalty has no part in it.
    """
    # In float64: scores of several functions may cancel, and the division must not blow up what rounding leaves.
    columns = inputs.rewards.double().unbind(dim=1)
    scores = [by_group(rewards, inputs.group_ids, group_zscore) for rewards in columns]
    total = torch.stack(scores, dim=1) @ inputs.weights.double()  # [N]
    whitened = _whitened(total, torch.ones_like(total), epsilon)
    return torch.where(has_spread(inputs.rewards, inputs.group_ids), whitened, 0.0).float()


def by_group(rewards: Tensor, group_ids: Tensor, advantage: Advantage) -> Tensor:
    """Advantages [N] of rewards [N], group by group; 0 in a group of one, which has nothing to compare with.

    Groups are found by id, never by stride.
    """
    result = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = (group_ids == group).nonzero().squeeze(1)
        if len(members) > 1:
            result[members] = _checked(advantage(rewards[members]), len(members), advantage)
    return result


def compute_advantages(inputs: AdvantageInputs, advantage: Advantage, is_valid: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages [N] and keep mask [N]; samples that are not valid take no part in either.

    A group that has nothing to teach is not kept: within a group, one with equal rewards or a single valid sample; over
    the batch, one whose advantages are all 0.
    """
    valid = AdvantageInputs(
        rewards=inputs.rewards[is_valid],
        weights=inputs.weights,
        total=inputs.total[is_valid],
        group_ids=inputs.group_ids[is_valid],
        lengths=inputs.lengths[is_valid],
    )
    result, keep = torch.zeros_like(inputs.total), torch.zeros_like(is_valid)
    if not is_valid.any():
        return result, keep
    if is_over_batch(advantage):
        result[is_valid] = _checked(advantage(valid), len(valid.total), advantage)
        keep[is_valid] = _any_in_group(result[is_valid] != 0, valid.group_ids)
    else:
        result[is_valid] = by_group(valid.total, valid.group_ids, advantage)
        keep[is_valid] = has_spread(valid.total[:, None], valid.group_ids)
    return result, keep


def is_over_batch(advantage: Advantage) -> bool:
    """Whether the argument of the function is declared as AdvantageInputs."""
    annotation = next(iter(inspect.signature(advantage).parameters.values())).annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2] == AdvantageInputs.__name__


def _checked(advantages: Tensor, count: int, advantage: Advantage) -> Tensor:
    if advantages.shape == (count,) and advantages.isfinite().all():
        return advantages
    name = getattr(getattr(advantage, "func", advantage), "__name__", advantage)
    raise ValueError(
        f"advantage {name} returned {advantages.tolist()} for {count} rewards; it must return a finite number for each"
    )


def has_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Whether any column of rewards [N, K] differs within the group of a sample, [N] bool."""
    result = torch.zeros(len(group_ids), dtype=torch.bool)
    for group in group_ids.unique():
        is_member = group_ids == group
        members = rewards[is_member]
        result[is_member] = (members.amax(dim=0) != members.amin(dim=0)).any()
    return result


def _any_in_group(claims: Tensor, group_ids: Tensor) -> Tensor:
    return torch.isin(group_ids, group_ids[claims].unique())


def _whitened(values: Tensor, counts: Tensor, epsilon: float) -> Tensor:
    """(value - mean) / (std + epsilon) where value i occurs counts[i] times; 0 when all that occur are equal."""
    occurring = values[counts > 0]
    if len(occurring) == 0 or occurring.max() == occurring.min():
        return torch.zeros_like(values)
    mean = (values * counts).sum() / counts.sum()
    return (values - mean) / (_std(values, counts) + epsilon)


def _std(values: Tensor, counts: Tensor) -> Tensor:
    """Standard deviation with Bessel's correction where value i occurs counts[i] times; 0 for fewer than two."""
    total = counts.sum()
    mean = (values * counts).sum() / total
    return ((values - mean).square() * counts).sum().div((total - 1).clamp(min=1)).sqrt()
