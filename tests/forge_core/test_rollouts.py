"""From sampled ids to what the trainer gets: the ids themselves, never a text encoded again."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.examples import Example, Message
from forge_core.generator import Completion
from forge_core.rollouts import Rollouts
from forge_core.stages.rollout import gather

EXAMPLE = Example(id="e", messages=(Message(role="user", content="?"),), answer="1")
HEL, LO, EOS = 11, 12, 2  # "hello" encodes as one other id


def gathered(*completions: Completion, prompt: tuple[int, ...] = (5, 6)) -> Rollouts:
    rollouts, _ = gather([EXAMPLE], [list(prompt)], [list(completions)])
    return rollouts


def test_the_trainer_gets_the_ids_that_were_sampled_and_trains_the_token_that_ends_them(tmp_path: Path):
    rollouts = gathered(Completion((HEL, LO, EOS), (-0.1, -0.2, -0.3), "stop", "hello"))
    rollouts.save(tmp_path)
    sequence = Rollouts.load(tmp_path).sequence(0)
    assert sequence.token_ids.tolist() == [5, 6, HEL, LO, EOS]
    assert sequence.loss_mask.tolist() == [False, False, True, True, True]
    torch.testing.assert_close(sequence.generator_logprobs, torch.tensor([0, 0, -0.1, -0.2, -0.3]))


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=6))
def test_every_completion_has_as_many_log_probs_as_ids_and_trains_all_of_them(completions: list[list[int]]):
    rollouts = gathered(*[Completion(tuple(ids), (-1.0,) * len(ids), "stop", "") for ids in completions])
    for index, ids in enumerate(completions):
        sequence = rollouts.sequence(index)
        assert sequence.token_ids.tolist() == [5, 6, *ids]
        assert len(sequence.generator_logprobs) == len(sequence.loss_mask) == 2 + len(ids)
        assert sequence.loss_mask.sum() == len(ids)


def test_a_completion_with_a_token_whose_log_prob_is_missing_is_dropped_and_counted():
    whole, torn = Completion((1, 2), (-1.0, -1.0), "stop", "a"), Completion((1, 2), (-1.0, math.nan), "stop", "b")
    rollouts, num_dropped = gather([EXAMPLE], [[5]], [[torn, whole, torn]])
    assert (len(rollouts), num_dropped) == (1, 2)
    assert rollouts.texts[0].completion == "a"
