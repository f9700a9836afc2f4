"""From the scored rollout sets of an iteration to the minibatches of its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forge_core.batching import TrainSequence
from forge_core.rollouts import Rollouts, Scores


@dataclass(frozen=True)
class ScoredSet:
    """A rollout set with its scores and, when there is a reference policy, its log-probs [T] for the same tokens."""

    rollouts: Rollouts
    scores: Scores
    reference_logprobs: Tensor | None = None

    @property
    def kept_groups(self) -> list[int]:
        """Ids of the groups that are trained on, ascending."""
        return self.rollouts.group_ids[self.scores.keep].unique().tolist()

    @property
    def is_idle(self) -> Tensor:
        """Kept completions of groups in which every advantage is 0, [N] bool."""
        teaching = self.rollouts.group_ids[self.scores.keep & (self.scores.advantages != 0)].unique()
        return self.scores.keep & ~torch.isin(self.rollouts.group_ids, teaching)


@dataclass
class Minibatch:
    """Completions of one optimizer step; those of `idle_lengths` (in tokens) count and have no gradient."""

    sequences: list[TrainSequence] = field(default_factory=list)
    idle_lengths: list[int] = field(default_factory=list)


def deal(sets: Sequence[ScoredSet], count: int, *, num_groups: int = 0, skip_idle: bool = True) -> list[Minibatch]:
    """Kept completions, dealt to `count` minibatches by whole groups; a minibatch with nothing to learn is left out.

    Of more than `num_groups` groups the first ones are taken (0 takes all). `skip_idle` spares completions without an
    advantage the forward pass; that is exact when an advantage of 0 makes a loss of 0.
    """
    groups = [(place, group) for place, scored in enumerate(sets) for group in scored.kept_groups]
    minibatch_of = {key: number % count for number, key in enumerate(groups[: num_groups or None])}
    minibatches = [Minibatch() for _ in range(count)]
    for place, scored in enumerate(sets):
        is_idle = scored.is_idle & skip_idle
        for index in scored.scores.keep.nonzero().squeeze(1).tolist():
            key = (place, int(scored.rollouts.group_ids[index]))
            if key not in minibatch_of:
                continue
            minibatch = minibatches[minibatch_of[key]]
            if is_idle[index]:
                minibatch.idle_lengths.append(int(scored.rollouts.completion_lengths[index]))
            else:
                advantage = float(scored.scores.advantages[index])
                minibatch.sequences.append(
                    scored.rollouts.sequence(index, advantage=advantage, reference_logprobs=scored.reference_logprobs)
                )
    return [minibatch for minibatch in minibatches if minibatch.sequences]


def count_groups(sets: Sequence[ScoredSet], num_groups: int) -> dict[str, float]:
    """Groups with something to teach that were not needed, and batches it took, under their tracking names."""
    kept = sum(len(scored.kept_groups) for scored in sets)
    return {
        "groups/surplus": max(0, kept - num_groups) if num_groups else 0,
        "rollout/generation_batches": len(sets),
    }
