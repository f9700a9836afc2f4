"""Stage `update`: policy[k + 1] = update(policy[k], scored[k]), the fold that makes policies of stored rollouts."""

from __future__ import annotations

import logging

import torch

from forge_core import artifacts
from forge_core.artifacts import Manifest, Ref
from forge_core.batching import TrainBatch, TrainSequence, pack_sequences
from forge_core.corrections import with_proximal
from forge_core.functions import load_function
from forge_core.holds import keep
from forge_core.jobs import UpdateJob
from forge_core.manifests import root_of
from forge_core.rollouts import Rollouts, Scores
from forge_core.stages import learner
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.policy_trainer import NonFiniteError, PolicyTrainer

logger = logging.getLogger(__name__)


def run(job: UpdateJob, workspace: Workspace) -> Manifest | None:
    """Apply one update to the policy the job names; returns the manifest on rank 0."""
    watch = Stopwatch()
    with watch("load"):
        trainer = learner.trainer_at(job, workspace, replay=apply_update)
    with watch("update"):
        summary = apply_update(trainer, job, workspace)
    summary["tokens_per_second/update"] = summary["tokens/total"] / watch.seconds["update"]
    manifest = learner.publish_policy(job, job.policy, trainer, workspace, summary=summary, watch=watch)
    if job.snapshot_output is not None:
        workspace.defer(lambda: learner.snapshot(job, trainer, workspace))
    return manifest


def apply_update(trainer: PolicyTrainer, job: UpdateJob, workspace: Workspace) -> dict[str, float]:
    """The optimizer steps of one update; metrics averaged over them. The same bits every time it is replayed."""
    rollouts, scores = _read(job.scored, workspace)
    loss = load_function(job.loss, "loss")
    workspace.injection.model = trainer.model
    batches = _batches(trainer, rollouts, scores, job)
    steps = []
    for _ in range(job.epochs):
        for batch, mismatch in batches:
            workspace.injection.reach("work")
            try:
                metrics = trainer.train_step(
                    batch, loss, temperature=job.temperature, entropy_coefficient=job.entropy_coefficient
                )
            except NonFiniteError as error:
                raise _with_rollouts(error, job, workspace) from error
            steps.append(metrics | mismatch)
    if not steps:
        # Every group has equal rewards: there is no gradient, and a step on stale momentum would be an invention.
        logger.warning("%s has no group with a spread of rewards; the policy stays as it is", job.scored.uri)
        return {
            "update/steps": 0,
            "tokens/total": 0,
            "tokens/trained": 0,
            "update/memory_halvings": job.memory_halvings,
        }
    summary = {
        name: max(values) if name.endswith("/max") else sum(values) / len(values)
        for name, values in ((name, [step[name] for step in steps]) for name in steps[0])
    }
    summary |= {name: sum(step[name] for step in steps) for name in ("tokens/total", "tokens/trained")}
    return summary | {"update/steps": len(steps), "update/memory_halvings": job.memory_halvings}


def _with_rollouts(error: NonFiniteError, job: UpdateJob, workspace: Workspace) -> NonFiniteError:
    """The error with the names of what it came from, kept for whoever looks into it: the update can be done again."""
    if workspace.rank == 0:
        keep(root_of(job.output), job.policy, f"the update {job.output} was not finite")
    rollouts = artifacts.resolve(job.scored).inputs["rollouts"]
    return NonFiniteError(f"{error}. Rollouts {rollouts.uri}, scored {job.scored.uri}")


def _batches(
    trainer: PolicyTrainer, rollouts: Rollouts, scores: Scores, job: UpdateJob
) -> list[tuple[TrainBatch, dict[str, float]]]:
    """The packed minibatches of an update, and how far trainer and generator differ on each if that is known.

    All of it is fixed before the first step, so the trainer's log-probs are those of the policy the update starts from.
    """
    batches: list[tuple[TrainBatch, dict[str, float]]] = []
    for members in _minibatches(rollouts, scores, job.minibatches):
        row_tokens = learner.row_tokens(job, members)
        batch = pack_sequences(members, row_tokens, aggregation=job.aggregation, max_tokens=job.max_tokens or None)
        mismatch: dict[str, float] = {}
        if job.proximal == "trainer":
            logprobs = trainer.logprobs(batch, temperature=job.temperature)
            batch, mismatch = with_proximal(batch, logprobs, job.correction)
        batches.append((batch, mismatch))
    return batches


def _read(scored: Ref, workspace: Workspace) -> tuple[Rollouts, Scores]:
    manifest, scores_dir = workspace.fetch(scored)
    _, rollouts_dir = workspace.fetch(manifest.inputs["rollouts"])
    return Rollouts.load(rollouts_dir), Scores.load(scores_dir)


def _minibatches(rollouts: Rollouts, scores: Scores, count: int) -> list[list[TrainSequence]]:
    """Kept completions, dealt to `count` minibatches by whole groups; a minibatch without any is left out."""
    minibatches: list[list[TrainSequence]] = [[] for _ in range(count)]
    kept_groups = rollouts.group_ids[scores.keep].unique().tolist()
    place = {group: position % count for position, group in enumerate(kept_groups)}
    for index in scores.keep.nonzero().squeeze(1).tolist():
        tokens = slice(int(rollouts.offsets[index]), int(rollouts.offsets[index + 1]))
        ids = rollouts.token_ids[tokens]
        sequence = TrainSequence(
            token_ids=ids,
            loss_mask=torch.arange(len(ids)) >= rollouts.prompt_lengths[index],
            generator_logprobs=rollouts.generator_logprobs[tokens],
            advantage=float(scores.advantages[index]),
        )
        minibatches[place[int(rollouts.group_ids[index])]].append(sequence)
    return [minibatch for minibatch in minibatches if minibatch]
