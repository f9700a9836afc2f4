"""Stage `sft`: supervised fine-tuning of a policy on the assistant turns of a dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_core.artifacts import Manifest
from forge_core.batching import TrainBatch, TrainSequence, pack_sequences
from forge_core.chat import encode_turns, load_tokenizer
from forge_core.data_config import ChatConfig
from forge_core.examples import read_examples
from forge_core.jobs import FitJob, SftJob
from forge_core.losses import cross_entropy
from forge_core.stages import learner
from forge_core.stages.fit import Fit, history, summarise
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.policy_trainer import PolicyTrainer

logger = logging.getLogger(__name__)


def run(job: SftJob, workspace: Workspace) -> Manifest | None:
    """Train for at most `num_steps` optimizer steps; returns the manifest on rank 0."""
    watch = Stopwatch()
    with watch("load"):
        _, policy_dir = workspace.fetch(job.policy)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        conversations = encode(dataset_dir / "examples.jsonl", policy_dir, job.chat)
        heldout: list[list[TrainSequence]] = []
        if job.validation is not None and job.sft.validation is not None:
            _, heldout_dir = workspace.fetch(job.validation)
            heldout = encode(
                heldout_dir / "examples.jsonl", policy_dir, job.chat, limit=job.sft.validation.num_examples
            )
        total_steps = job.sft.total_steps(len(conversations))
        trainer = learner.trainer_from_policy(job, job.policy, job.sft.optimizer, total_steps, workspace)
        course = Conversations(trainer, job, conversations, dataset.sha256_of("examples.jsonl"), heldout)
    with watch("sft"):
        progress = Fit(trainer, job, course, workspace).run()
    summary = summarise(progress, "sft") | {
        "sft/conversations_too_long": count_too_long(conversations, job),
        "sft/conversations_split": sum(len(pieces) > 1 for pieces in conversations),
        "tokens_per_second/sft": sum(step["tokens/total"] for step in progress.steps) / watch.seconds["sft"],
    }
    beside = {"history.jsonl": history(progress)}
    return learner.publish_policy(job, job.policy, trainer, workspace, summary=summary, watch=watch, beside=beside)


@dataclass
class Conversations:
    """What SFT learns; a conversation is one sequence, or several where the template re-renders earlier turns."""

    trainer: PolicyTrainer
    job: SftJob
    conversations: Sequence[list[TrainSequence]]
    content: str
    heldout: Sequence[list[TrainSequence]]

    def __post_init__(self) -> None:
        for name, conversations in (("dataset", self.conversations), ("validation dataset", self.heldout)):
            num_too_long = count_too_long(conversations, self.job)
            if num_too_long:
                logger.warning(
                    "%d of %d conversations of the %s are longer than a row and left out",
                    num_too_long,
                    len(conversations),
                    name,
                )

    @property
    def num_items(self) -> int:
        """Conversations, those that are left out included: a place in the stream does not depend on a row's length."""
        return len(self.conversations)

    def step(self, indices: list[int]) -> dict[str, float]:
        """One optimizer step on these conversations."""
        return self.trainer.train_step(self._pack([self.conversations[index] for index in indices]), cross_entropy)

    def validate(self) -> tuple[float, dict[str, float]]:
        """Cross-entropy of the held-out conversations, nats per token, or what `aggregation` makes of it."""
        batch = self._pack(self.heldout)
        return -float((self.trainer.logprobs(batch) * batch.weights).sum()), {}

    def _pack(self, conversations: Sequence[list[TrainSequence]]) -> TrainBatch:
        members = [piece for pieces in conversations for piece in pieces if fits(piece, self.job)]
        return pack_sequences(members, learner.row_tokens(self.job, members), aggregation=self.job.sft.aggregation)


def fits(sequence: TrainSequence, job: FitJob) -> bool:
    """Whether a sequence is short enough to be trained; it is never cut."""
    return len(sequence.token_ids) <= job.trainer.row_tokens


def count_too_long(conversations: Sequence[list[TrainSequence]], job: FitJob) -> int:
    """Conversations that are left out, wholly or in part."""
    return sum(not all(fits(piece, job) for piece in pieces) for pieces in conversations)


def encode(
    examples_path: Path, policy_dir: Path, chat: ChatConfig, *, limit: int | None = None
) -> list[list[TrainSequence]]:
    """The dataset's conversations as token ids with a mask on what the assistant says."""
    turns_of = encoder(policy_dir, chat)
    found = []
    for example in read_examples(examples_path)[:limit]:
        try:
            found.append(turns_of(example.conversation))
        except ValueError as error:
            raise ValueError(f"example {example.id}: {error}") from error
    return found


def encoder(policy_dir: Path, chat: ChatConfig) -> Callable[[list[dict]], list[TrainSequence]]:
    """Messages -> the sequences that train their assistant turns, by the policy's chat template."""
    tokenizer = load_tokenizer(policy_dir)

    def turns_of(messages: list[dict]) -> list[TrainSequence]:
        return [
            TrainSequence(
                token_ids=torch.tensor(ids), loss_mask=torch.tensor(mask), generator_logprobs=torch.zeros(len(ids))
            )
            for ids, mask in encode_turns(tokenizer, messages, chat)
        ]

    return turns_of
