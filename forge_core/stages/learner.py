"""The trainer a stage process keeps warm, and how to get one to a policy version: hold it, load it, or replay to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Manifest, Ref
from forge_core.batching import TrainSequence
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.jobs import FitJob, ReferenceJob, UpdateJob
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.models import PolicyShape
from forge_core.trainer.policy_trainer import PolicyTrainer

logger = logging.getLogger(__name__)

# A constant schedule has no end, but torchtitan wants one that is never reached.
UNBOUNDED_STEPS = 1_000_000_000


@dataclass
class Learner:
    """A live trainer, and the policy version whose weights *and* optimizer state it holds (None: not a known one).

    `config` has the micro-batch that fits into memory.
    """

    trainer: PolicyTrainer
    config: TrainerConfig
    policy: Ref | None

    def holds(self, job: UpdateJob) -> bool:
        """Whether the update can start from here as it is."""
        fits = self.config == job.trainer.halved(job.memory_halvings)
        return fits and self.policy is not None and self.policy.digest == job.policy.digest


def trainer_from_policy(
    job: FitJob | UpdateJob | ReferenceJob,
    policy: Ref,
    optimizer: OptimizerConfig,
    total_steps: int,
    workspace: Workspace,
) -> PolicyTrainer:
    """A trainer with the stored weights of `policy` and a fresh optimizer; re-using a warm one gives the same bits."""
    _, hf_dir = workspace.fetch(policy)
    learner: Learner | None = workspace.held.get("learner")
    total_steps = total_steps or UNBOUNDED_STEPS
    config = job.trainer.halved(job.memory_halvings)
    if learner is not None and learner.config == config and learner.trainer.shape == PolicyShape.read(hf_dir):
        learner.policy = None
        learner.trainer.load_policy(hf_dir)
        learner.trainer.reset_optimizer(optimizer, total_steps)
        return learner.trainer
    if learner is not None:
        learner.trainer.close()
    trainer = PolicyTrainer.open(
        hf_dir,
        trainer=config,
        optimizer=optimizer,
        total_steps=total_steps,
        seed=job.seed,
        scratch=workspace.scratch / "trainer",
    )
    workspace.held["learner"] = Learner(trainer, config, None)
    return trainer


def trainer_at(
    job: UpdateJob, workspace: Workspace, *, replay: Callable[[PolicyTrainer, UpdateJob, Workspace], object]
) -> PolicyTrainer:
    """A trainer with weights and optimizer state of `job.policy`.

    The warm one if it holds that version. Otherwise policies are walked back along their manifests to the newest
    readable snapshot, or to the policy the optimizer started from, and the stored rollouts are replayed from there.
    """
    learner: Learner | None = workspace.held.get("learner")
    if learner is not None and learner.holds(job):
        return learner.trainer
    to_replay: list[UpdateJob] = []
    policy, state_dir = job.policy, None
    while (manifest := artifacts.resolve(policy)).job["stage"] == "update":
        made_by = UpdateJob.model_validate(manifest.job)
        state_dir = _readable_snapshot(policy, made_by, workspace)
        if state_dir is not None:
            break
        to_replay.append(made_by)
        policy = made_by.policy
    trainer = trainer_from_policy(job, policy, job.optimizer, job.total_steps, workspace)
    if state_dir is not None:
        trainer.load_train_state(state_dir)
    for past in reversed(to_replay):
        logger.info("replaying the update that made %s", past.output)
        workspace.injection.record("replay", of=past.label)
        halvings = max(past.memory_halvings, job.memory_halvings)
        replay(trainer, past.model_copy(update={"memory_halvings": halvings}), workspace)
    if to_replay and not artifacts.is_pruned(job.policy.uri):
        _, hf_dir = workspace.fetch(job.policy)
        # Replay gives the same bits on the same hardware. The published weights are what rollouts were sampled from, so
        # they count wherever it does not.
        trainer.load_trained(hf_dir)
    workspace.held["learner"].policy = job.policy
    return trainer


def row_tokens(job: FitJob | UpdateJob | ReferenceJob, sequences: Sequence[TrainSequence]) -> int:
    """Length of a packed row that fits into memory; raises ValueError when a sequence does not fit into such a row."""
    if not sequences:
        raise ValueError(
            f"every document is longer than trainer.row_tokens ({job.trainer.row_tokens}); raise it, none is cut"
        )
    tokens = job.trainer.halved(job.memory_halvings).row_tokens
    longest = max(len(sequence.token_ids) for sequence in sequences)
    if job.memory_halvings and longest > tokens:
        raise ValueError(
            f"the trainer ran out of memory, and a micro-batch of one sequence of {longest} tokens cannot be halved; "
            "set trainer.activation_checkpoint to full, raise trainer.num_ranks, or lower sampling.max_tokens"
        )
    return tokens


def publish_policy(
    job: FitJob | UpdateJob,
    source: Ref,
    trainer: PolicyTrainer,
    workspace: Workspace,
    *,
    summary: dict,
    watch: Stopwatch,
    beside: Mapping[str, str] | None = None,
) -> Manifest | None:
    """Export the trainer's weights and commit them as the job's output; the manifest on rank 0, None on other ranks.

    `beside` has the content of further files by name.
    """
    _, source_dir = workspace.fetch(_with_files(source))
    manifest = None
    with workspace.directory() as directory:
        with watch("export"):
            trainer.export_hf(directory, source_dir)
        if workspace.rank == 0:
            for name, content in (beside or {}).items():
                (directory / name).write_text(content)
            manifest = workspace.commit(job, directory, summary=summary, timings=watch.seconds)
            _require_ours(manifest, directory)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the other ranks read what rank 0 has committed
    committed = artifacts.read_manifest(job.output)
    assert committed is not None
    # What follows SFT begins with an optimizer of its own, so only an update leaves a state to continue from.
    workspace.held["learner"].policy = committed.ref if job.stage == "update" else None
    return manifest


def snapshot(job: UpdateJob, trainer: PolicyTrainer, workspace: Workspace) -> None:
    """Commit the train state (model, optimizer, schedule, step) beside the policy version it belongs to."""
    assert job.snapshot_output is not None
    if artifacts.read_manifest(job.snapshot_output) is not None:
        return
    directory = workspace.scratch / "snapshot"  # one path for all ranks: each writes its own shards
    trainer.save_train_state(directory)
    if workspace.rank == 0:
        policy = workspace.held["learner"].policy
        artifacts.commit(
            directory,
            job.snapshot_output,
            kind="train_state",
            job=job.as_json(),
            job_digest=job.digest(),
            inputs={"policy": policy},
            summary={},
            software=job.software,
            timings={},
        )
        logger.info("committed snapshot %s", job.snapshot_output)


def _with_files(policy: Ref) -> Ref:
    """The policy, or the nearest one it was made from whose files retention has left: same shape, same tokenizer."""
    while artifacts.is_pruned(policy.uri):
        policy = UpdateJob.model_validate(artifacts.resolve(policy).job).policy
    return policy


def _readable_snapshot(policy: Ref, made_by: UpdateJob, workspace: Workspace) -> Path | None:
    if made_by.snapshot_output is None:
        return None
    try:
        manifest = artifacts.read_manifest(made_by.snapshot_output)
        if manifest is None:
            logger.info("there is no snapshot %s, going further back", made_by.snapshot_output)
            return None
        if manifest.inputs["policy"].digest != policy.digest:
            return None
        return workspace.fetch(manifest.ref)[1]
    except ArtifactError as error:
        logger.warning("snapshot %s cannot be used, going further back: %s", made_by.snapshot_output, error)
        return None


def _require_ours(manifest: Manifest, directory: Path) -> None:
    for record in manifest.files:
        path = directory / record.path
        if not path.is_file() or storage.sha256_file(path) != record.sha256:
            raise ArtifactError(
                f"{manifest.uri} was committed by another process with other weights; run the job again"
            )
