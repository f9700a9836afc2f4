"""One iteration's rollouts with their scores: one batch of prompts, or as many as it takes to find enough to learn."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from forge_core.artifacts import Ref, resolve
from tasks import stages
from tasks.run import Run


class NothingToLearnError(RuntimeError):
    """Dynamic sampling has found too few groups with a spread of rewards."""


@dataclass(frozen=True)
class Batch:
    """The completions of one batch of prompts."""

    rollouts: Ref
    reference_logprobs: Ref | None
    scored: Ref


def sample(
    run: Run, policy: Ref, reference: Ref | None, problems: Ref, iteration: int, earlier_refills: int
) -> list[Batch]:
    """Rollouts of `policy`, scored; with dynamic sampling, batch after batch until enough groups have a spread.

    Which batches there are follows from stored scores alone, so a resumed run samples the same. Raises
    NothingToLearnError when `max_generation_batches` are not enough.
    """
    settings, plan = run.plan.grpo_config, run.plan
    assert settings is not None
    wanted, dynamic = settings.prompts_per_iteration, settings.dynamic_sampling
    batches: list[Batch] = []
    for refill in range(1 if dynamic is None else dynamic.max_generation_batches):
        rollouts = stages.rollout(
            plan.rollout(policy, problems, iteration, refill=refill, earlier_refills=earlier_refills)
        )
        compared = (
            stages.reference(plan.reference(reference, rollouts, iteration, refill=refill)) if reference else None
        )
        scored = stages.score(plan.score(rollouts, iteration, reference_logprobs=compared, refill=refill))
        batches.append(Batch(rollouts, compared, scored))
        if dynamic is None or _count_informative(batches) >= wanted:
            return batches
        run.logger.info("%d of %d groups to learn from so far; sampling more", _count_informative(batches), wanted)
    raise NothingToLearnError(
        f"iteration {iteration}: {len(batches)} generation batches of {wanted} prompts gave "
        f"{_count_informative(batches)} groups with a spread of rewards, {wanted} are wanted. {_advice(batches)}"
    )


def _count_informative(batches: list[Batch]) -> int:
    return sum(int(resolve(batch.scored).summary["groups/informative"]) for batch in batches)


def _advice(batches: list[Batch]) -> str:
    mean_reward = statistics.fmean(resolve(batch.scored).summary["reward/mean"] for batch in batches)
    difficulty = "easy: take harder ones" if mean_reward > 0.5 else "hard: take easier ones, or more SFT"
    return (
        f"The mean reward is {mean_reward:.3f}: the data are too {difficulty}. Or raise "
        "grpo.dynamic_sampling.max_generation_batches or grpo.group_size"
    )
