"""Stage `score`: a rollout set -> rewards by function, their weighted total, and advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core import kl
from forge_core.advantages import AdvantageInputs, compute_advantages, has_spread
from forge_core.artifacts import Manifest
from forge_core.config import RewardConfig
from forge_core.functions import labels, load_function
from forge_core.jobs import ScoreJob
from forge_core.rewards.overlong import overlong_penalties
from forge_core.rewards.pool import RewardPool
from forge_core.rollouts import Rollouts, Scores, load_reference_logprobs
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.update_config import Estimator


def run(job: ScoreJob, workspace: Workspace) -> Manifest:
    """Score every completion with every reward function."""
    watch = Stopwatch()
    pool = reward_pool(workspace, job.rewards, job.source_sha256)  # a new one imports while the rollouts are fetched
    _, rollouts_dir = workspace.fetch(job.rollouts)
    rollouts, reference = Rollouts.load(rollouts_dir), None
    if job.kl is not None and job.reference_logprobs is not None:
        reference = load_reference_logprobs(workspace.fetch(job.reference_logprobs)[1])
    with watch("score"):
        rewards, counts = score_rollouts(rollouts, pool)
        scores, shaping = compare(rollouts, rewards, job, reference)
    workspace.injection.reach("work")
    with workspace.directory() as directory:
        scores.save(directory)
        summary = describe(scores, job.rewards) | counts | shaping
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def score_rollouts(rollouts: Rollouts, pool: RewardPool) -> tuple[Tensor, dict[str, float]]:
    """Rewards by function, [N, K], NaN where a completion could not be scored; and what else there is to report."""
    scored = pool.score([(text.completion, text.example) for text in rollouts.texts])
    counts: dict[str, float] = {"reward/timeouts": scored.num_timeouts, "reward/crashes": scored.num_crashes}
    counts |= scored.metrics
    return torch.tensor(scored.values, dtype=torch.float32), counts


def compare(
    rollouts: Rollouts, rewards: Tensor, job: ScoreJob, reference: Tensor | None = None
) -> tuple[Scores, dict[str, float]]:
    """Total rewards and advantages from rewards [N, K], and what penalties and dropping have changed.

    `reference` are the reference policy's log-probs [T] when the job penalises the distance from it.
    """
    rewards = gated(rewards, job.rewards)
    weights = torch.tensor([reward.weight for reward in job.rewards])
    unshaped = total = (rewards * weights).sum(dim=1)  # [N], NaN when any function could not score
    shaping: dict[str, float] = {}
    if job.kl is not None:
        assert reference is not None
        penalties = job.kl.coefficient * kl_penalties(rollouts, reference, job.kl.estimated_by)
        total = total - penalties
        shaping["reward/kl_penalty"] = penalties.mean().item()
    if job.overlong is not None:
        penalties = overlong_penalties(
            rollouts.completion_lengths,
            max_tokens=job.max_tokens,
            buffer_tokens=job.overlong.buffer_tokens,
            penalty=job.overlong.penalty,
        )
        total = total + penalties
        shaping["reward/overlong_penalty"] = penalties.mean().item()
    is_valid = ~total.isnan()
    if job.drop_truncated:
        shaping["completion/dropped_truncated"] = int(rollouts.is_truncated.sum())
        is_valid &= ~rollouts.is_truncated
    inputs = AdvantageInputs(rewards, weights, total, rollouts.group_ids, rollouts.completion_lengths)
    advantages, is_informative = compute_advantages(inputs, load_function(job.advantage, "advantage"), is_valid)
    if job.spread_of == "rewards":
        is_informative[is_valid] &= has_spread(unshaped[is_valid][:, None], rollouts.group_ids[is_valid])
    num_groups = len(rollouts.group_ids.unique())
    num_informative = len(rollouts.group_ids[is_informative].unique())
    shaping |= {
        "groups/informative": num_informative,
        "groups/uniform_fraction": 1 - num_informative / num_groups,
        "groups/without_valid_completion": num_groups - len(rollouts.group_ids[is_valid].unique()),
    }
    keep = is_informative if job.drop_uniform else is_valid
    return Scores(rewards=rewards, total=total, advantages=advantages, keep=keep), shaping


def gated(rewards: Tensor, configs: tuple[RewardConfig, ...]) -> Tensor:
    """Rewards [N, K], each 0 where the one that is its gate is below 1; what could not be scored stays NaN."""
    names = [config.fn for config in configs]
    result = rewards.clone()
    for column, config in enumerate(configs):
        if config.gate is not None:
            is_shut = rewards[:, names.index(config.gate)] < 1
            result[is_shut & ~rewards[:, column].isnan(), column] = 0
    return result


def kl_penalties(rollouts: Rollouts, reference: Tensor, estimator: Estimator) -> Tensor:
    """KL(policy || reference) of each completion, the sum over its tokens, [N], from reference log-probs [T]."""
    sampled = rollouts.generator_logprobs
    per_token = torch.where(rollouts.is_completion, kl.penalty(estimator, sampled, reference, sampled), 0.0)
    owner = torch.arange(len(rollouts)).repeat_interleave(rollouts.offsets.diff())
    return torch.zeros(len(rollouts)).index_add(0, owner, per_token)


def reward_pool(
    workspace: Workspace,
    rewards: tuple[RewardConfig, ...],
    sources: dict[str, str],
    extractors: dict[str, str] | None = None,
) -> RewardPool:
    """Worker processes for these functions: the warm ones if they hold the same sources, else new ones."""
    held: tuple[object, RewardPool] | None = workspace.held.get("rewards")
    if held is not None:
        if held[0] == (rewards, sources, extractors):
            return held[1]
        held[1].close()
    pool = RewardPool(rewards, extractors=extractors, scratch=workspace.scratch)
    workspace.held["rewards"] = ((rewards, sources, extractors), pool)
    return pool


def describe(scores: Scores, rewards: tuple[RewardConfig, ...]) -> dict[str, float]:
    """Reward and advantage statistics under their tracking names."""
    valid = scores.total[~scores.total.isnan()]
    if len(valid) == 0:
        raise ValueError(
            "no completion could be scored: for each one a reward function returned None, took too long or crashed; "
            "check the reward's input"
        )
    by_function = {
        f"reward_by_function/{label}": scores.rewards[:, column].nanmean().item()
        for column, label in enumerate(labels(rewards))
    }
    return {
        "reward/mean": valid.mean().item(),
        "reward/std": valid.std(correction=0).item(),
        "reward/unscored": len(scores.total) - len(valid),
        "advantage/std": scores.advantages.std(correction=0).item(),
        **by_function,
    }
