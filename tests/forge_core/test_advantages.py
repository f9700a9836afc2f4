"""Advantages against hand-computed numbers and the faults that other systems shipped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from forge_core.advantages import advantages_by_group, group_mean, group_zscore, leave_one_out

GOLDEN_REWARDS = tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
GOLDEN_GROUPS = tensor([0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (group_zscore, [0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, 1.499997, -0.499999]),
        (group_mean, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, 0.75, -0.25]),
        (leave_one_out, [0.666667, -0.666667, -0.666667, 0.666667, -0.333333, -0.333333, 1.0, -0.333333]),
    ],
)
def test_golden_advantages(advantage, expected):
    found, keep = advantages_by_group(GOLDEN_REWARDS, GOLDEN_GROUPS, advantage)
    assert torch.allclose(found, tensor(expected), atol=1e-6)
    assert keep.all()


@pytest.mark.parametrize("advantage", [group_zscore, group_mean, leave_one_out])
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 0.95])
def test_equal_rewards_have_exactly_zero_advantage(advantage, value):
    for size in range(3, 17):
        assert advantage(torch.full((size,), value)).tolist() == [0.0] * size


def test_groups_are_found_by_id_when_their_sizes_differ():
    rewards = tensor([1.0, 0, 0, 1, 5, 5, 5, 0, 1, 0, 0])
    groups = tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    found, keep = advantages_by_group(rewards, groups, group_zscore)
    assert found[4:7].tolist() == [0.0, 0.0, 0.0]
    assert not keep[4:7].any()
    assert torch.equal(found[:4], group_zscore(rewards[:4]))
    assert torch.equal(found[7:], group_zscore(rewards[7:]))


def test_advantages_do_not_depend_on_the_order_of_rows():
    order = torch.tensor([5, 0, 7, 3, 1, 6, 2, 4])
    plain, _ = advantages_by_group(GOLDEN_REWARDS, GOLDEN_GROUPS, group_zscore)
    shuffled, _ = advantages_by_group(GOLDEN_REWARDS[order], GOLDEN_GROUPS[order], group_zscore)
    assert torch.allclose(shuffled, plain[order], atol=1e-7)


def test_an_unscored_completion_is_left_out_of_its_group():
    found, keep = advantages_by_group(tensor([1.0, 0, math.nan, 0]), tensor([0, 0, 0, 0]), group_mean)
    assert torch.allclose(found, tensor([2 / 3, -1 / 3, 0, -1 / 3]))  # mean of 1, 0, 0
    assert keep.tolist() == [True, True, False, True]


def test_a_group_that_cannot_be_scored_or_compared_is_not_kept():
    found, keep = advantages_by_group(tensor([math.nan, math.nan, 1.0]), tensor([0, 0, 1]), group_zscore)
    assert found.tolist() == [0.0, 0.0, 0.0]
    assert not keep.any()


def test_leave_one_out_of_a_single_completion_is_refused():
    with pytest.raises(ValueError, match="group_size"):
        leave_one_out(tensor([1.0]))
