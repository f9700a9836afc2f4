"""One call of a reward: exceptions and words are errors with a name, None abstains."""

from __future__ import annotations

import math

import pytest

from forge_core.examples import Example, Message
from forge_core.rewards.worker import call_reward

EXAMPLE = Example(id="e7", messages=(Message(role="user", content="1+1="),), answer="2")


def test_a_reward_that_raises_is_named_with_its_example():
    def reward(completion, example):
        raise KeyError("solution")

    with pytest.raises(ValueError, match=r"mine:reward raised KeyError\('solution'\) on example e7"):
        call_reward(reward, "mine:reward", "2", EXAMPLE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1"])
def test_a_reward_that_is_not_a_finite_number_is_an_error(value):
    with pytest.raises(ValueError, match=r"mine:reward returned .* for example e7; .*None"):
        call_reward(lambda completion, example: value, "mine:reward", "2", EXAMPLE)


def test_a_reward_may_abstain():
    assert math.isnan(call_reward(lambda completion, example: None, "mine:reward", "2", EXAMPLE))
