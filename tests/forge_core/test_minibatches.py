"""From scored rollout sets to minibatches: which groups, in which one, and what of them is computed."""

from __future__ import annotations

import torch

from forge_core.examples import Example, Message
from forge_core.minibatches import Minibatch, ScoredSet, count_groups, deal
from forge_core.rollouts import Rollouts, RolloutTexts, Scores

EXAMPLE = Example(id="x", messages=(Message(role="user", content="?"),))


def scored(advantages: list[float], keep: list[bool] | None = None, *, first_token: int = 0) -> ScoredSet:
    """Completions two to a group, number i with i + 1 tokens; each token id is that of its completion."""
    count = len(advantages)
    lengths = torch.arange(1, count + 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + 1).cumsum(0)])
    ids = torch.arange(first_token, first_token + count).repeat_interleave(lengths + 1)
    rollouts = Rollouts(
        token_ids=ids,
        generator_logprobs=torch.zeros(len(ids)),
        offsets=offsets,
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        group_ids=torch.arange(count) // 2,
        texts=tuple(RolloutTexts(EXAMPLE, "", "stop") for _ in advantages),
    )
    kept = torch.tensor(keep or [True] * count)
    return ScoredSet(rollouts, Scores(torch.zeros(count, 1), torch.zeros(count), torch.tensor(advantages), kept))


def members(minibatch: Minibatch) -> list[int]:
    return [int(sequence.token_ids[0]) for sequence in minibatch.sequences]


def test_whole_groups_are_dealt_in_turn():
    dealt = deal([scored([1.0, -1] * 3)], 2)
    assert [members(minibatch) for minibatch in dealt] == [[0, 1, 4, 5], [2, 3]]
    assert [sequence.advantage for sequence in dealt[0].sequences] == [1, -1, 1, -1]


def test_the_groups_of_several_sets_follow_each_other_and_those_beyond_the_wanted_number_are_left():
    sets = [scored([1.0, -1] * 2, [True, True, False, False]), scored([1.0, -1] * 3, first_token=10)]
    assert [members(minibatch) for minibatch in deal(sets, 2, num_groups=3)] == [[0, 1, 12, 13], [10, 11]]
    assert count_groups(sets, 3) == {"groups/surplus": 1, "rollout/generation_batches": 2}
    assert count_groups(sets, 0)["groups/surplus"] == 0


def test_groups_without_an_advantage_count_without_being_computed():
    sets = [scored([1.0, -1, 0, 0, 0, 2])]
    [spared] = deal(sets, 1)
    assert (members(spared), spared.idle_lengths) == ([0, 1, 4, 5], [3, 4])
    [whole] = deal(sets, 1, skip_idle=False)
    assert (members(whole), whole.idle_lengths) == ([0, 1, 2, 3, 4, 5], [])
    assert deal([scored([0.0, 0])], 1) == []


def test_what_is_not_kept_is_neither_computed_nor_counted():
    [minibatch] = deal([scored([1.0, -1, 0, 0], [True, True, False, False])], 2)
    assert (members(minibatch), minibatch.idle_lengths) == ([0, 1], [])


def test_reference_log_probs_go_with_their_tokens():
    plain = scored([1.0, -1])
    reference = torch.arange(len(plain.rollouts.token_ids)).float()
    [minibatch] = deal([ScoredSet(plain.rollouts, plain.scores, reference)], 1)
    found = [sequence.reference_logprobs for sequence in minibatch.sequences]
    assert [logprobs.tolist() for logprobs in found if logprobs is not None] == [[0, 1], [2, 3, 4]]
