"""Stage `qat`: a policy fine-tuned a little while it computes with quantized numbers, so that it loses less by them."""

from __future__ import annotations

import logging
import statistics
from pathlib import Path

from forge_core.artifacts import Manifest
from forge_core.batching import TrainSequence, pack_sequences
from forge_core.examples import take
from forge_core.jobs import QatJob
from forge_core.losses import cross_entropy
from forge_core.rollouts import Rollouts
from forge_core.stages import learner
from forge_core.stages.sft import encode
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.fake_quantization import fake_quantized

logger = logging.getLogger(__name__)


def run(job: QatJob, workspace: Workspace) -> Manifest | None:
    """Train for `num_steps` optimizer steps; returns the manifest on rank 0."""
    watch = Stopwatch()
    with watch("load"):
        trainer = learner.trainer_from_policy(
            job,  # pyrefly: ignore [bad-argument-type]  of a job it reads trainer, seed and memory_halvings
            job.policy,
            job.optimizer,
            job.num_steps,
            workspace,
        )
        _, policy_dir = workspace.fetch(job.policy)
        everything = _sequences(job, workspace, policy_dir)
        sequences = [one for one in everything if len(one.token_ids) <= job.trainer.row_tokens]
        row_tokens = learner.row_tokens(job, sequences)  # pyrefly: ignore [bad-argument-type]
    metrics = []
    with watch("qat"), fake_quantized(trainer.model, trainer.adapter, job.quantize) as names:
        for step in range(job.num_steps):
            start = step * job.batch_size
            window = take(len(sequences), start=start, count=job.batch_size, seed=job.seed, digest=job.policy.digest)
            batch = pack_sequences([sequences[index] for index in window], row_tokens)
            metrics.append(trainer.train_step(batch, cross_entropy))
            if step == job.num_steps // 2:
                workspace.injection.reach("work")
    logger.info("%d steps with %d layers quantized", len(metrics), len(names))
    summary = {
        "qat/first_loss": metrics[0]["loss/policy"],
        "qat/loss": statistics.fmean(step["loss/policy"] for step in metrics[-10:]),
        "qat/steps": len(metrics),
        "qat/layers": len(names),
        "qat/sequences_too_long": len(everything) - len(sequences),
    }
    return learner.publish_policy(
        job,  # pyrefly: ignore [bad-argument-type]
        job.policy,
        trainer,
        workspace,
        summary=summary,
        watch=watch,
    )


def _sequences(job: QatJob, workspace: Workspace, policy_dir: Path) -> list[TrainSequence]:
    """What is learned: the policy's own completions, or conversations of a dataset."""
    if job.dataset is not None:
        _, directory = workspace.fetch(job.dataset)
        conversations = encode(directory / "examples.jsonl", policy_dir, job.chat)
        return [piece for pieces in conversations for piece in pieces]
    found = []
    for ref in job.rollouts:
        _, directory = workspace.fetch(ref)
        rollouts = Rollouts.load(directory)
        found += [rollouts.sequence(place) for place in range(len(rollouts))]
    return found
