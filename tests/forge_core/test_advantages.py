"""Advantages against golden and hand-computed numbers and the faults that other systems shipped."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, tensor

from forge_core import advantages
from forge_core.advantages import (
    AdvantageInputs,
    batch_std,
    compute_advantages,
    gdpo,
    group_mean,
    group_zscore,
    leave_one_out,
    reinforce_pp,
    reinforce_pp_baseline,
)
from tests.forge_core import golden

WITHIN_GROUP = [group_zscore, group_mean, leave_one_out]
RELATIVE = [*WITHIN_GROUP, batch_std, reinforce_pp_baseline, gdpo]


def inputs(rewards: Tensor, group_ids: Tensor, *, weights: Tensor | None = None, lengths: Tensor | None = None):
    rewards = rewards[:, None] if rewards.dim() == 1 else rewards
    weights = torch.ones(rewards.shape[1]) if weights is None else weights
    lengths = torch.full((len(rewards),), 3) if lengths is None else lengths
    return AdvantageInputs(rewards, weights, rewards @ weights, group_ids, lengths)


def compute(advantage, rewards: Tensor, group_ids: Tensor, **others) -> tuple[Tensor, Tensor]:
    found = inputs(rewards, group_ids, **others)
    return compute_advantages(found, advantage, ~found.total.isnan())


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (group_zscore, [0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, 1.499997, -0.499999]),
        (group_mean, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]),
        (leave_one_out, [0.666667, -0.666667, -0.666667, 0.666667, -0.333333, -0.333333, 1.0, -0.333333]),
        (
            reinforce_pp_baseline,
            [0.983863, -1.054139, -1.054139, 0.983863, -0.544639, -0.544639, 1.493364, -0.544639],
        ),
        (reinforce_pp, [1.256956, -0.768140, -0.768140, 1.256956, -0.768140, -0.768140, 1.256956, -0.768140]),
    ],
)
def test_golden_advantages(advantage, expected):
    found, keep = compute(advantage, golden.REWARDS, golden.GROUPS, lengths=golden.LENGTHS)
    torch.testing.assert_close(found, tensor(expected), atol=1e-6, rtol=0)
    assert keep.all()


def test_batch_std_divides_by_the_spread_of_all_rewards():
    # Rewards 0 2 | 4 4: mean 2.5, squares 6.25 + .25 + 2.25 + 2.25 = 11, std sqrt(11 / 3); group means 1 and 4.
    found, keep = compute(batch_std, tensor([0.0, 2, 4, 4]), tensor([0, 0, 1, 1]))
    std = math.sqrt(11 / 3)
    torch.testing.assert_close(found, tensor([-1 / std, 1 / std, 0, 0]), atol=1e-6, rtol=0)
    assert found[2:].tolist() == [0.0, 0.0]
    assert keep.tolist() == [True, True, False, False]


def test_gdpo_keeps_rewards_of_different_scale_apart():
    # Correct or not, and a length score a hundred times as large. Each is +-1/sqrt(2) within its group of two:
    # .7071 (1 +- 1 w) with w = .5: 1.0607, -1.0607 | .3536, -.3536, mean 0.
    rewards = tensor([[1.0, 100.0], [0.0, 0.0], [1.0, 0.0], [0.0, 100.0]])
    found, _ = compute(gdpo, rewards, tensor([0, 0, 1, 1]), weights=tensor([1.0, 0.5]))
    std = math.sqrt(2 * (1.06066**2 + 0.353553**2) / 3)
    expected = tensor([1.06066, -1.06066, 0.353553, -0.353553]) / std
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_gdpo_tells_equal_totals_apart():
    # z-scores 1.5 -.5 -.5 -.5 and -.866 .866 -.866 .866: the first two completions have the same total reward, 1.
    rewards = tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    found, keep = compute(gdpo, rewards, torch.zeros(4, dtype=torch.int64))
    assert keep.all()
    std = math.sqrt((0.633975**2 + 2 * 0.366025**2 + 1.366025**2) / 3)
    torch.testing.assert_close(found, tensor([0.633975, 0.366025, -1.366025, 0.366025]) / std, atol=1e-5, rtol=0)


def test_gdpo_of_scores_that_cancel_is_zero_and_not_their_rounding_error():
    # Three functions of which two together undo the third: z-scores a, a and -a, with weights .1, .2 and .3.
    column = tensor([0.1, 0.7, 0.3, 0.95])
    rewards = torch.stack([column, column, -column], dim=1)
    found, _ = compute(gdpo, rewards, torch.zeros(4).long(), weights=tensor([0.1, 0.2, 0.1 + 0.2]))
    assert found.abs().max() < 0.05


@pytest.mark.parametrize("advantage", RELATIVE)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 0.95])
def test_equal_rewards_have_exactly_zero_advantage(advantage, value):
    for size in range(1, 17):
        # Beside a group that has something to teach, with completions of other lengths.
        rewards = torch.cat([torch.full((size,), value), tensor([1.0, 0.0, 0.25])])
        groups = torch.cat([torch.zeros(size), torch.ones(3)]).long()
        found, keep = compute(advantage, rewards, groups, lengths=torch.arange(size + 3) + 1)
        assert found[:size].tolist() == [0.0] * size
        assert not keep[:size].any()
        assert keep[size:].all()


@pytest.mark.parametrize("advantage", [*RELATIVE, reinforce_pp])
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 0.95])
def test_a_batch_of_equal_rewards_has_exactly_zero_advantage(advantage, value):
    for size in range(1, 17):
        found, keep = compute(advantage, torch.full((size,), value), torch.arange(size) // 4)
        assert found.tolist() == [0.0] * size
        assert not keep.any()


@pytest.mark.parametrize("advantage", WITHIN_GROUP)
def test_groups_are_found_by_id_when_their_sizes_differ(advantage):
    rewards = tensor([1.0, 0, 0, 1, 5, 5, 5, 0, 1, 0, 0])
    groups = tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    found, keep = compute(advantage, rewards, groups)
    assert found[4:7].tolist() == [0.0, 0.0, 0.0]
    assert not keep[4:7].any()
    assert torch.equal(found[:4], advantage(rewards[:4]))
    assert torch.equal(found[7:], advantage(rewards[7:]))


@pytest.mark.parametrize("advantage", [*RELATIVE, reinforce_pp])
def test_advantages_do_not_depend_on_the_order_of_rows(advantage):
    order = torch.tensor([5, 0, 7, 3, 1, 6, 2, 4])
    plain, _ = compute(advantage, golden.REWARDS, golden.GROUPS, lengths=golden.LENGTHS)
    shuffled, _ = compute(advantage, golden.REWARDS[order], golden.GROUPS[order], lengths=golden.LENGTHS[order])
    torch.testing.assert_close(shuffled, plain[order], atol=1e-6, rtol=0)


@pytest.mark.parametrize("advantage", [*RELATIVE, reinforce_pp])
def test_an_unscored_completion_is_as_if_it_had_not_been_sampled(advantage):
    rewards, groups = tensor([1.0, 0, math.nan, 0, 1, 0]), tensor([0, 0, 0, 0, 1, 1])
    found, keep = compute(advantage, rewards, groups)
    others = ~rewards.isnan()
    without, _ = compute(advantage, rewards[others], groups[others])
    assert torch.equal(found[others], without)
    assert (found[2].item(), keep.tolist()) == (0.0, others.tolist())


def test_an_unscored_completion_is_left_out_of_its_groups_mean():
    found, keep = compute(group_mean, tensor([1.0, 0, math.nan, 0]), tensor([0, 0, 0, 0]))
    torch.testing.assert_close(found, tensor([2 / 3, -1 / 3, 0, -1 / 3]))  # mean of 1, 0, 0
    assert keep.tolist() == [True, True, False, True]


@pytest.mark.parametrize("advantage", RELATIVE)
def test_a_group_that_cannot_be_scored_or_compared_is_not_kept(advantage):
    found, keep = compute(advantage, tensor([math.nan, math.nan, 1.0]), tensor([0, 0, 1]))
    assert found.tolist() == [0.0, 0.0, 0.0]
    assert not keep.any()


def test_leave_one_out_of_a_single_completion_is_refused():
    with pytest.raises(ValueError, match="group_size"):
        leave_one_out(tensor([1.0]))


def test_a_users_function_is_called_by_group_unless_its_argument_is_the_batch():
    def ranks(rewards, *, scale=1.0):
        return rewards.argsort().argsort().float() * scale

    def over_batch(found: advantages.AdvantageInputs) -> Tensor:
        return found.total - found.total.mean()

    doubled = functools.partial(ranks, scale=2.0)
    assert compute(doubled, tensor([3.0, 1, 5, 7]), tensor([0, 0, 1, 1]))[0].tolist() == [2, 0, 0, 2]
    assert compute(over_batch, tensor([3.0, 1, 5, 7]), tensor([0, 0, 1, 1]))[0].tolist() == [-1, -3, 1, 3]


def test_a_function_that_returns_something_else_is_refused_by_name():
    def broken(rewards):
        return rewards.mean()

    with pytest.raises(ValueError, match=r"advantage broken returned 0\.5 for 2 rewards; it must return a finite"):
        compute(broken, tensor([1.0, 0.0]), tensor([0, 0]))


def test_format_alone_teaches_nothing_and_never_beats_a_right_answer():
    # Weights 1 (right) and .2 (well formatted): eight wrong but well formatted completions are all alike.
    rewards, weights = torch.tensor([[0.0, 1.0]] * 8), tensor([1.0, 0.2])
    assert not compute(group_zscore, rewards, torch.zeros(8).long(), weights=weights)[1].any()
    rewards = tensor([[1.0, 0.0], [0.0, 1.0]])
    found, _ = compute(group_zscore, rewards, torch.zeros(2).long(), weights=weights)
    assert found[0] > found[1]
