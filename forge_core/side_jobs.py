"""Jobs of a run beside the line of its policies: pure functions of its plan."""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.artifacts import Ref, sha256_json
from forge_core.config import RewardModelRunConfig
from forge_core.jobs import OverlapJob, RewardModelJob
from forge_core.plan import Plan


def overlap_job(plan: Plan, dataset: Ref, held_out: Sequence[Ref]) -> OverlapJob:
    """Look for the problems of the evaluations, whose datasets are `held_out`, in a training set."""
    evals, num_words = plan.config.evals, plan.config.overlap.num_words
    counts = [evaluation.num_examples for evaluation in evals]
    # In the name: evaluations and this setting may change between two attempts of a run.
    against = sha256_json([[ref.digest for ref in held_out], counts, num_words])[:8]
    return OverlapJob(
        output=f"{plan.run_uri}/overlaps/{dataset.uri.rpartition('/')[2]}-{against}",
        dataset=dataset,
        held_out=tuple(held_out),
        names=tuple(evaluation.name for evaluation in evals),
        counts=tuple(counts),
        num_words=num_words,
    )


def reward_model_job(plan: Plan, policy: Ref, dataset: Ref, validation: Ref | None = None) -> RewardModelJob:
    """A reward model of preference pairs."""
    config = plan.config
    assert isinstance(config, RewardModelRunConfig)
    return RewardModelJob(
        output=f"{plan.run_uri}/reward_models/v0000",
        policy=policy,
        dataset=dataset,
        validation=validation,
        reward_model=config.reward_model,
        chat=config.chat,
        trainer=config.trainer,
        seed=config.seed,
        snapshot_output=f"{plan.run_uri}/train_states/reward_model",
    )
