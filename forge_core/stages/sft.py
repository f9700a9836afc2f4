"""Stage `sft`: supervised fine-tuning of a policy on the assistant turns of a dataset."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path

import torch
from transformers import AutoTokenizer

from forge_core.artifacts import Manifest
from forge_core.batching import TrainSequence, pack_sequences
from forge_core.chat import encode_conversation
from forge_core.examples import read_examples, take
from forge_core.jobs import SftJob
from forge_core.losses import cross_entropy
from forge_core.stages.learner import publish_policy, trainer_from_policy
from forge_core.stages.workspace import Stopwatch, Workspace

logger = logging.getLogger(__name__)


def run(job: SftJob, workspace: Workspace) -> Manifest | None:
    """Train `num_steps` optimizer steps of `batch_size` examples each; returns the manifest on rank 0."""
    watch = Stopwatch()
    with watch("load"):
        trainer = trainer_from_policy(job, job.policy, job.num_steps, workspace)
        _, dataset_dir = workspace.fetch(job.dataset)
        _, policy_dir = workspace.fetch(job.policy)
        sequences = encode(dataset_dir / "examples.jsonl", policy_dir)
    metrics: list[dict[str, float]] = []
    with watch("sft"):
        for step in range(job.num_steps):
            window = take(
                len(sequences),
                start=step * job.batch_size,
                count=job.batch_size,
                seed=job.seed,
                digest=job.dataset.digest,
            )
            batch = pack_sequences([sequences[index] for index in window], job.trainer.row_tokens)
            metrics.append(trainer.train_step(batch, cross_entropy))
            if (step + 1) % 50 == 0:
                logger.info("sft step %d/%d loss %.4f", step + 1, job.num_steps, metrics[-1]["loss/policy"])
    tail = metrics[-10:]
    num_tokens = sum(step["tokens/total"] for step in metrics)
    summary = {
        "sft/loss": statistics.fmean(step["loss/policy"] for step in tail),
        "sft/first_loss": metrics[0]["loss/policy"],
        "sft/grad_norm": statistics.fmean(step["grad_norm/total"] for step in tail),
        "tokens_per_second/sft": num_tokens / watch.seconds["sft"],
    }
    return publish_policy(job, job.policy, trainer, workspace, summary=summary, watch=watch)


def encode(examples_path: Path, policy_dir: Path) -> list[TrainSequence]:
    """The dataset's conversations as token ids with a mask on what the assistant says."""
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
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
