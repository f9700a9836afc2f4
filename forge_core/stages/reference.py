"""Stage `reference`: log-probs of a rollout set's completions under a frozen policy, aligned with the rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from forge_core import kl
from forge_core.artifacts import Manifest
from forge_core.batching import pack_sequences
from forge_core.config import OptimizerConfig
from forge_core.jobs import ReferenceJob
from forge_core.rollouts import Rollouts, save_reference_logprobs
from forge_core.stages import learner
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.policy_trainer import PolicyTrainer
from forge_core.trainer.weights import read_shards, standing_in


def run(job: ReferenceJob, workspace: Workspace) -> Manifest | None:
    """Evaluate every completion once; returns the manifest on rank 0."""
    watch = Stopwatch()
    with watch("load"):
        _, rollouts_dir = workspace.fetch(job.rollouts)
        rollouts = Rollouts.load(rollouts_dir)
    with _frozen_policy(job, workspace) as trainer, watch("reference"):
        logprobs = reference_logprobs(trainer, rollouts, job)
    workspace.injection.reach("work")
    if workspace.rank > 0:
        return None
    with workspace.directory() as directory:
        save_reference_logprobs(logprobs, directory)
        summary = describe(rollouts, logprobs)
        summary["tokens_per_second/reference"] = len(logprobs) / watch.seconds["reference"]
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def reference_logprobs(trainer: PolicyTrainer, rollouts: Rollouts, job: ReferenceJob) -> Tensor:
    """Log-probs [T] of the completions' tokens, 0 on prompts: the offsets are those of the rollouts."""
    sequences = [rollouts.sequence(index) for index in range(len(rollouts))]
    batch = pack_sequences(sequences, learner.row_tokens(job, sequences))
    packed = trainer.logprobs(batch, temperature=job.temperature).flatten()
    owners = batch.sequence_ids.flatten()
    in_order = packed[owners.argsort(stable=True)][(owners < 0).sum() :]  # [T], at the position that predicts a token
    # The last position of a completion predicts nothing and holds 0, which falls on the first token of the next prompt.
    return torch.cat([torch.zeros(1), in_order[:-1]])


def describe(rollouts: Rollouts, reference: Tensor) -> dict[str, float]:
    """How far the policy that sampled is from the reference policy, nats per completion token."""
    is_completion = rollouts.is_completion
    sampled, reference = rollouts.generator_logprobs[is_completion], reference[is_completion]
    if len(sampled) == 0:
        return {"kl/sampled_k1": 0.0, "kl/sampled_k3": 0.0}
    return {
        "kl/sampled_k1": kl.k1(sampled, reference).double().mean().item(),
        "kl/sampled_k3": kl.k3(sampled, reference).double().mean().item(),
    }


@contextmanager
def _frozen_policy(job: ReferenceJob, workspace: Workspace) -> Iterator[PolicyTrainer]:
    """A trainer with the weights of `job.policy`, loaded once: its own, or the one in training, which takes them on."""
    if job.runs_on == "trainer" and "learner" in workspace.held:
        trainer: PolicyTrainer = workspace.held["learner"].trainer
        if workspace.held.get("reference_shards", ("", {}))[0] != job.policy.digest:
            workspace.held["reference_shards"] = (job.policy.digest, _read_shards_of(job, trainer, workspace))
        with standing_in(trainer.model, workspace.held["reference_shards"][1]):
            yield trainer
        return
    if workspace.held.get("reference") != job.policy.digest:
        learner.trainer_from_policy(job, job.policy, OptimizerConfig(), 0, workspace)
        workspace.held["reference"] = job.policy.digest
    yield workspace.held["learner"].trainer


def _read_shards_of(job: ReferenceJob, trainer: PolicyTrainer, workspace: Workspace) -> dict[str, Tensor]:
    _, hf_dir = workspace.fetch(job.policy)
    with standing_in(trainer.model, read_shards(trainer.model)):
        trainer.load_policy(hf_dir)
        return read_shards(trainer.model)
