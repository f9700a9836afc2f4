"""Stage `update`: policy[k + 1] = update(policy[k], scored[k]), the fold that makes policies of stored rollouts."""

from __future__ import annotations

import logging

from forge_core import artifacts
from forge_core.artifacts import Manifest, Ref
from forge_core.batching import TrainBatch, pack_sequences
from forge_core.corrections import with_proximal
from forge_core.functions import load_function
from forge_core.holds import keep
from forge_core.jobs import UpdateJob
from forge_core.manifests import root_of
from forge_core.minibatches import ScoredSet, count_groups, deal
from forge_core.rollouts import Rollouts, Scores, load_reference_logprobs
from forge_core.stages import learner
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.checks import NonFiniteError
from forge_core.trainer.policy_trainer import PolicyTrainer

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
    sets = [_read(scored, workspace) for scored in job.scored]
    loss = load_function(job.loss, "loss")
    workspace.injection.model = trainer.model
    batches = _batches(trainer, sets, job)
    counts = count_groups(sets, job.num_groups) | {"update/memory_halvings": job.memory_halvings}
    steps = []
    for _ in range(job.epochs):
        for batch, mismatch in batches:
            workspace.injection.reach("work")
            try:
                metrics = trainer.train_step(
                    batch,
                    loss,
                    temperature=job.temperature,
                    kl=job.kl,
                    entropy_coefficient=job.entropy_coefficient,
                )
            except NonFiniteError as error:
                raise _with_rollouts(error, job, workspace) from error
            steps.append(metrics | mismatch)
    if not steps:
        # Every group has equal rewards: there is no gradient, and a step on stale momentum would be an invention.
        logger.warning("%s has no group with a spread of rewards; the policy stays as it is", job.scored[0].uri)
        return counts | {"update/steps": 0, "tokens/total": 0, "tokens/trained": 0}
    summary = {
        name: max(values) if name.endswith("/max") else sum(values) / len(values)
        for name, values in ((name, [step[name] for step in steps]) for name in steps[0])
    }
    summary |= {name: sum(step[name] for step in steps) for name in ("tokens/total", "tokens/trained")}
    return summary | counts | {"update/steps": len(steps)}


def _with_rollouts(error: NonFiniteError, job: UpdateJob, workspace: Workspace) -> NonFiniteError:
    """The error with the names of what it came from, kept for whoever looks into it: the update can be done again."""
    if workspace.rank == 0:
        keep(root_of(job.output), job.policy, f"the update {job.output} was not finite")
    sources = [(artifacts.resolve(scored).inputs["rollouts"].uri, scored.uri) for scored in job.scored]
    return NonFiniteError("; ".join([str(error), *(f"rollouts {rollouts}, scored {uri}" for rollouts, uri in sources)]))


def _batches(
    trainer: PolicyTrainer, sets: list[ScoredSet], job: UpdateJob
) -> list[tuple[TrainBatch, dict[str, float]]]:
    """The packed minibatches of an update, and how far trainer and generator differ on each if that is known.

    All of it is fixed before the first step, so the trainer's log-probs are those of the policy the update starts from.
    """
    # A loss of the user's, a KL term and an entropy bonus may have a gradient where the advantage is 0.
    skip_idle = ":" not in job.loss.fn and job.kl is None and job.entropy_coefficient == 0
    batches: list[tuple[TrainBatch, dict[str, float]]] = []
    for minibatch in deal(sets, job.minibatches, num_groups=job.num_groups, skip_idle=skip_idle):
        batch = pack_sequences(
            minibatch.sequences,
            learner.row_tokens(job, minibatch.sequences),
            aggregation=job.aggregation,
            max_tokens=job.max_tokens or None,
            idle_lengths=minibatch.idle_lengths,
        )
        mismatch: dict[str, float] = {}
        if job.proximal == "trainer":
            logprobs = trainer.logprobs(batch, temperature=job.temperature)
            batch, mismatch = with_proximal(batch, logprobs, job.correction)
        batches.append((batch, mismatch))
    return batches


def _read(scored: Ref, workspace: Workspace) -> ScoredSet:
    manifest, scores_dir = workspace.fetch(scored)
    _, rollouts_dir = workspace.fetch(manifest.inputs["rollouts"])
    reference = None
    if (ref := manifest.inputs.get("reference_logprobs")) is not None:
        reference = load_reference_logprobs(workspace.fetch(ref)[1])
    return ScoredSet(Rollouts.load(rollouts_dir), Scores.load(scores_dir), reference)
