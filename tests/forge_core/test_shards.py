"""A rollout in parts: which prompts each has, and what they make together."""

from __future__ import annotations

import torch

from forge_core.artifacts import Ref
from forge_core.examples import Example, Message
from forge_core.jobs import MergeJob, RolloutJob
from forge_core.plan import Plan
from forge_core.rollouts import Rollouts, RolloutTexts, join
from forge_core.shards import split
from tests.pipeline import tiny_config


def rollout_job(num_prompts: int) -> RolloutJob:
    policy = Ref(kind="policy", uri="/x/run/policies/v0001", digest="p")
    dataset = Ref(kind="dataset", uri="/x/run/datasets/d", digest="d")
    job = Plan(tiny_config("/x"), "run").rollout(policy, dataset, iteration=1)
    return job.model_copy(update={"num_prompts": num_prompts})


def rollout_set(lengths: list[int], group_ids: list[int]) -> Rollouts:
    """Completions of so many tokens after prompts of one, numbered from 0."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(int(ends[-1]))
    example = Example(id="x", messages=(Message(role="user", content="?"),))
    return Rollouts(
        token_ids=tokens,
        generator_logprobs=-tokens.float(),
        offsets=ends,
        prompt_lengths=torch.ones(len(lengths), dtype=torch.int64),
        group_ids=torch.tensor(group_ids),
        texts=tuple(RolloutTexts(example, str(length), "stop") for length in lengths),
    )


def test_parts_have_the_prompts_of_the_whole_in_order():
    job = rollout_job(7)  # of iteration 1 with 8 prompts each: it starts at place 8
    parts = split(job, 3)
    assert [(part.first_prompt, part.num_prompts) for part in parts] == [(8, 2), (10, 2), (12, 3)]
    assert [part.output for part in parts] == [f"file:///x/run/rollout_shards/v0002-0{part}-of-03" for part in range(3)]


def test_there_are_no_more_parts_than_prompts():
    assert [part.num_prompts for part in split(rollout_job(2), 5)] == [1, 1]


def test_a_rollout_that_was_sampled_in_parts_is_the_same_job():
    job = rollout_job(8)
    shard = Ref(kind="rollouts", uri="/x/run/rollout_shards/v0002-00-of-01", digest="s")
    assert MergeJob(output=job.output, rollout=job, shards=(shard,)).digest() == job.digest()


def test_parts_are_joined_with_their_offsets_and_groups():
    # The second group of the first part has no completion: its number is taken all the same.
    joined = join([rollout_set([2, 3], [0, 0]), rollout_set([4, 2], [0, 1])], num_groups=[2, 2])
    assert joined.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]
    assert joined.generator_logprobs.tolist() == [0, -1, -2, -3, -4, 0, -1, -2, -3, -4, -5]
    assert joined.offsets.tolist() == [0, 2, 5, 9, 11]
    assert joined.group_ids.tolist() == [0, 0, 2, 3]
    assert joined.completion_lengths.tolist() == [1, 2, 3, 1]
    assert [text.completion for text in joined.texts] == ["2", "3", "4", "2"]
