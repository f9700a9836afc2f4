"""Stage `sft`: supervised fine-tuning of a policy on the assistant turns of a dataset."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path

import torch

from forge_core.artifacts import Manifest
from forge_core.batching import TrainSequence, pack_sequences
from forge_core.chat import encode_conversation, load_tokenizer
from forge_core.examples import read_examples, take
from forge_core.jobs import SftJob
from forge_core.losses import cross_entropy
from forge_core.stages import learner
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.policy_trainer import PolicyTrainer

logger = logging.getLogger(__name__)


SMOOTHING = 0.8  # of the training loss that stop_below_loss is compared with


def run(job: SftJob, workspace: Workspace) -> Manifest | None:
    """Train for at most `num_steps` optimizer steps; returns the manifest on rank 0."""
    watch, settings = Stopwatch(), job.sft
    with watch("load"):
        trainer = learner.trainer_from_policy(job, job.policy, settings.optimizer, settings.num_steps, workspace)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        _, policy_dir = workspace.fetch(job.policy)
        sequences = encode(dataset_dir / "examples.jsonl", policy_dir)
        num_too_long = sum(not fits(sequence, job) for sequence in sequences)
        if num_too_long:
            logger.warning("%d of %d conversations are longer than a row and left out", num_too_long, len(sequences))
    with watch("sft"):
        metrics = train(trainer, sequences, job, workspace, dataset.sha256_of("examples.jsonl"))
    tail = metrics[-10:]
    summary = {
        "sft/loss": statistics.fmean(step["loss/policy"] for step in tail),
        "sft/first_loss": metrics[0]["loss/policy"],
        "sft/grad_norm": statistics.fmean(step["grad_norm/total"] for step in tail),
        "sft/steps": len(metrics),
        "sft/conversations_too_long": num_too_long,
        "tokens_per_second/sft": sum(step["tokens/total"] for step in metrics) / watch.seconds["sft"],
    }
    return learner.publish_policy(job, job.policy, trainer, workspace, summary=summary, watch=watch)


def train(
    trainer: PolicyTrainer, sequences: list[TrainSequence], job: SftJob, workspace: Workspace, content: str
) -> list[dict[str, float]]:
    """Metrics of each optimizer step; ends early, after the cool-down, once the smoothed loss is low enough.

    `content` is the digest of the examples, which with the seed decides their order.
    """
    settings = job.sft
    metrics: list[dict[str, float]] = []
    smoothed, stop_at, is_cooling = None, settings.num_steps, False
    row_tokens = learner.row_tokens(job, [sequence for sequence in sequences if fits(sequence, job)])
    while len(metrics) < stop_at:
        start = len(metrics) * settings.batch_size
        window = take(len(sequences), start=start, count=settings.batch_size, seed=job.seed, digest=content)
        # Left out here and not before, so that what is at a place of the stream does not depend on the length of a row.
        members = [sequences[index] for index in window if fits(sequences[index], job)]
        batch = pack_sequences(members, row_tokens)
        if len(metrics) == settings.num_steps // 2:
            workspace.injection.reach("work")
        metrics.append(trainer.train_step(batch, cross_entropy))
        loss = metrics[-1]["loss/policy"]
        smoothed = loss if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
        if not is_cooling and settings.stop_below_loss is not None and smoothed < settings.stop_below_loss:
            stop_at = min(len(metrics) + settings.cooldown_steps, settings.num_steps)
            logger.info("sft loss %.3f is below %.3f: stopping at step %d", smoothed, settings.stop_below_loss, stop_at)
            is_cooling = True
        if is_cooling:
            trainer.scale_learning_rate((stop_at - len(metrics)) / (settings.cooldown_steps + 1))
        if len(metrics) % 50 == 0:
            logger.info("sft step %d loss %.4f", len(metrics), smoothed)
    return metrics


def fits(sequence: TrainSequence, job: SftJob) -> bool:
    """Whether a conversation is short enough to be trained; it is never cut."""
    return len(sequence.token_ids) <= job.trainer.row_tokens


def encode(examples_path: Path, policy_dir: Path) -> list[TrainSequence]:
    """The dataset's conversations as token ids with a mask on what the assistant says."""
    tokenizer = load_tokenizer(policy_dir)
    sequences = []
    for example in read_examples(examples_path):
        ids, mask = encode_conversation(tokenizer, example.conversation)
        sequences.append(
            TrainSequence(
                token_ids=torch.tensor(ids),
                loss_mask=torch.tensor(mask),
                generator_logprobs=torch.zeros(len(ids)),
                advantage=0.0,
            )
        )
    return sequences
