"""Scoring: rewards that fail are errors with a name, rewards that abstain are counted."""

from __future__ import annotations

import math

import pytest
import torch

from forge_core.config import FunctionConfig, RewardConfig
from forge_core.examples import Example, Message
from forge_core.rollouts import RolloutTexts, Scores
from forge_core.stages.evaluate import pass_at_k
from forge_core.stages.score import call_reward, describe

EXAMPLE = Example(id="e7", messages=(Message(role="user", content="1+1="),), answer="2")
TEXT = RolloutTexts(EXAMPLE, "2", "stop")
CONFIG = FunctionConfig(fn="mine:reward")


def test_a_reward_that_raises_is_named_with_its_example():
    def reward(completion, example):
        raise KeyError("solution")

    with pytest.raises(ValueError, match=r"mine:reward raised KeyError\('solution'\) on example e7"):
        call_reward(reward, CONFIG, TEXT)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1"])
def test_a_reward_that_is_not_a_finite_number_is_an_error(value):
    with pytest.raises(ValueError, match=r"mine:reward returned .* for example e7; .*None"):
        call_reward(lambda completion, example: value, CONFIG, TEXT)


def test_a_reward_may_abstain():
    assert math.isnan(call_reward(lambda completion, example: None, CONFIG, TEXT))


def test_unscored_and_uniform_are_counted():
    scores = Scores(
        rewards=torch.tensor([[1.0], [0.0], [math.nan], [1.0]]),
        total=torch.tensor([1.0, 0.0, math.nan, 1.0]),
        advantages=torch.zeros(4),
        keep=torch.tensor([True, True, False, False]),
    )
    summary = describe(scores, torch.tensor([0, 0, 1, 1]), (RewardConfig(fn="mine:reward"),))
    assert summary["reward/mean"] == pytest.approx(2 / 3)  # of the three that could be scored
    assert summary["reward/unscored"] == 1
    assert summary["groups/uniform_fraction"] == 0.5
    assert summary["reward_by_function/reward"] == pytest.approx(2 / 3)


def test_pass_at_k_counts_draws_without_replacement():
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    with pytest.raises(ValueError, match="at least 5 samples"):
        pass_at_k(4, 1, 5)
