"""Runs with train states and evaluations, as their artifacts alone: something to prune."""

from __future__ import annotations

import tempfile
from pathlib import Path

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Manifest, Ref
from forge_core.config import GrpoConfig, PostTrainConfig
from forge_core.jobs import StageJob
from forge_core.operation import RetentionConfig
from forge_core.plan import Plan

KEEP_ONE = RetentionConfig(keep_last=1)


def commit(job: StageJob, uri: str, kind: artifacts.Kind, inputs: dict[str, Ref], summary: dict | None = None) -> Ref:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "content").write_text(f"{job.digest()} of {kind}")
        return artifacts.commit(
            Path(name),
            uri,
            kind=kind,
            job=job.as_json(),
            job_digest=job.digest(),
            inputs=inputs,
            summary=summary or {},
            software=job.software,
            timings={},
        ).ref


def store_run(root: str, *, num_iterations: int = 6, accuracy: dict[int, float] | None = None) -> Plan:
    """Start, SFT, then updates that make versions 2, 3, ..., with a train state for each even one and evaluations."""
    config = PostTrainConfig(root=root, grpo=GrpoConfig(num_iterations=num_iterations, checkpoint_every=2))
    plan = Plan(config, "run")
    assert plan.sft_config is not None

    def run(job: StageJob, summary: dict | None = None) -> Ref:
        return commit(job, job.output, job.kind, job.inputs, summary)

    problems = run(plan.dataset(config.grpo.dataset))
    policy = run(plan.sft(run(plan.start()), run(plan.dataset(plan.sft_config.dataset))))
    for iteration in range(num_iterations):
        scored = run(plan.score(run(plan.rollout(policy, problems, iteration)), iteration))
        update = plan.update(policy, [scored], iteration)
        policy = run(update)
        if update.snapshot_output:
            commit(update, update.snapshot_output, "train_state", {"policy": policy})
        if (value := (accuracy or {}).get(iteration + 2)) is not None:
            run(plan.evaluate(policy, problems, config.evals[0]), {"eval/heldout/accuracy": value})
    return plan


def policy(plan: Plan, version: int) -> Manifest:
    manifest = artifacts.read_manifest(f"{plan.run_uri}/policies/v{version:04d}")
    assert manifest is not None
    return manifest


def is_stored(ref: Ref) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            artifacts.fetch(ref, Path(scratch))
        except ArtifactError:
            return False
        return True


def stored_policies(plan: Plan) -> list[int]:
    names = storage.list_names(f"{plan.run_uri}/policies")
    return [number for number in range(len(names)) if is_stored(policy(plan, number).ref)]
