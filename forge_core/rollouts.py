"""Rollouts on disk: numbers in safetensors, words in JSON lines, and rewards that refer to them without copying."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge_core.artifacts import ArtifactError
from forge_core.batching import TrainSequence
from forge_core.examples import Example

_REFERENCE = "reference_logprobs"


@dataclass(frozen=True)
class RolloutTexts:
    """The words of one completion."""

    example: Example
    completion: str
    finish_reason: str


@dataclass(frozen=True)
class Rollouts:
    """N completions sampled from one policy version, as the engine returned them.

    Completion i is `token_ids[offsets[i]:offsets[i + 1]]`, of which the first `prompt_lengths[i]` are the prompt.
    `generator_logprobs` has the same offsets; it is 0 on prompt tokens.
    """

    token_ids: Tensor  # [T] int64
    generator_logprobs: Tensor  # [T] float32
    offsets: Tensor  # [N + 1] int64
    prompt_lengths: Tensor  # [N] int64
    group_ids: Tensor  # [N] int64
    texts: tuple[RolloutTexts, ...]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def completion_lengths(self) -> Tensor:
        """Tokens of each completion, [N]."""
        return self.offsets.diff() - self.prompt_lengths

    @property
    def is_completion(self) -> Tensor:
        """Tokens that are not of a prompt, [T] bool."""
        places = torch.arange(len(self.token_ids)) - self.offsets[:-1].repeat_interleave(self.offsets.diff())
        return places >= self.prompt_lengths.repeat_interleave(self.offsets.diff())

    @property
    def is_truncated(self) -> Tensor:
        """Completions that ran into the token limit, [N] bool."""
        return torch.tensor([text.finish_reason == "length" for text in self.texts])

    def sequence(
        self, index: int, *, advantage: float = 0.0, reference_logprobs: Tensor | None = None
    ) -> TrainSequence:
        """Completion `index` after its prompt, for the trainer; `reference_logprobs` [T] have the same offsets."""
        tokens = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        ids = self.token_ids[tokens]
        return TrainSequence(
            token_ids=ids,
            loss_mask=torch.arange(len(ids)) >= self.prompt_lengths[index],
            generator_logprobs=self.generator_logprobs[tokens],
            advantage=advantage,
            reference_logprobs=None if reference_logprobs is None else reference_logprobs[tokens],
        )

    def save(self, directory: Path) -> None:
        """Write rollouts.safetensors and rollouts.jsonl."""
        names = ("token_ids", "generator_logprobs", "offsets", "prompt_lengths", "group_ids")
        save_file({name: getattr(self, name) for name in names}, directory / "rollouts.safetensors")
        with (directory / "rollouts.jsonl").open("w") as file:
            for text in self.texts:
                row = {"completion": text.completion, "finish_reason": text.finish_reason}
                file.write(json.dumps(row | {"example": text.example.model_dump(mode="json")}) + "\n")

    @classmethod
    def load(cls, directory: Path) -> Rollouts:
        """Read what `save` wrote; raises ArtifactError when numbers and words do not belong together."""
        numbers = load_file(directory / "rollouts.safetensors")
        rows = [json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines()]
        if len(rows) != len(numbers["prompt_lengths"]):
            raise ArtifactError(f"{directory} has {len(rows)} texts for {len(numbers['prompt_lengths'])} completions")
        texts = tuple(
            RolloutTexts(Example.model_validate(row["example"]), row["completion"], row["finish_reason"])
            for row in rows
        )
        return cls(texts=texts, **numbers)


def describe(rollouts: Rollouts, generate_seconds: float) -> dict[str, float]:
    """Lengths and throughput of a rollout set under their tracking names.

    Lengths are of all completions; `terminated_mean` is of those that ended by themselves, if there are any.
    """
    lengths = rollouts.completion_lengths.tolist()
    terminated = rollouts.completion_lengths[~rollouts.is_truncated].tolist()
    distinct = len({(text.example.id, text.completion) for text in rollouts.texts})
    means = {"completion/length/terminated_mean": statistics.fmean(terminated)} if terminated else {}
    return means | {
        "completion/length/mean": statistics.fmean(lengths),
        "completion/length/max": max(lengths),
        "completion/truncated_fraction": rollouts.is_truncated.float().mean().item(),
        "completion/distinct_fraction": distinct / len(rollouts),
        "tokens_per_second/rollout": sum(lengths) / generate_seconds,
        "tokens/generated": sum(lengths),
    }


def join(shards: Sequence[Rollouts], num_groups: Sequence[int]) -> Rollouts:
    """One rollout set of several, in order; `num_groups` has the prompts of each, sampled or not."""
    first_tokens = accumulate((len(shard.token_ids) for shard in shards), initial=0)
    first_groups = accumulate(num_groups, initial=0)
    return Rollouts(
        token_ids=torch.cat([shard.token_ids for shard in shards]),
        generator_logprobs=torch.cat([shard.generator_logprobs for shard in shards]),
        offsets=torch.cat(
            [torch.zeros(1, dtype=torch.int64)]
            + [shard.offsets[1:] + first for shard, first in zip(shards, first_tokens, strict=False)]
        ),
        prompt_lengths=torch.cat([shard.prompt_lengths for shard in shards]),
        group_ids=torch.cat([shard.group_ids + first for shard, first in zip(shards, first_groups, strict=False)]),
        texts=tuple(text for shard in shards for text in shard.texts),
    )


@dataclass(frozen=True)
class Scores:
    """Rewards of a rollout set, by reward function and in total, and what follows from them."""

    rewards: Tensor  # [N, K] float32, NaN where a function could not score
    total: Tensor  # [N] float32, weighted sum and overlong penalty, NaN where any function could not score
    advantages: Tensor  # [N] float32
    keep: Tensor  # [N] bool, trained on

    def save(self, directory: Path) -> None:
        """Write scores.safetensors."""
        save_file(
            {name: getattr(self, name) for name in ("rewards", "total", "advantages", "keep")},
            directory / "scores.safetensors",
        )

    @classmethod
    def load(cls, directory: Path) -> Scores:
        """Read what `save` wrote."""
        return cls(**load_file(directory / "scores.safetensors"))


def save_reference_logprobs(logprobs: Tensor, directory: Path) -> None:
    """Write reference_logprobs.safetensors: one number per token of a rollout set, [T] float32, 0 on prompts."""
    save_file({_REFERENCE: logprobs}, directory / f"{_REFERENCE}.safetensors")


def load_reference_logprobs(directory: Path) -> Tensor:
    """Read what `save_reference_logprobs` wrote."""
    return load_file(directory / f"{_REFERENCE}.safetensors")[_REFERENCE]
