"""Stage `score`: a rollout set -> rewards by function, their weighted total, and advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.advantages import AdvantageInputs, compute_advantages
from forge_core.artifacts import Manifest
from forge_core.config import RewardConfig
from forge_core.functions import load_function
from forge_core.jobs import ScoreJob
from forge_core.rewards.overlong import overlong_penalties
from forge_core.rewards.pool import RewardPool
from forge_core.rollouts import Rollouts, Scores
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: ScoreJob, workspace: Workspace) -> Manifest:
    """Score every completion with every reward function."""
    watch = Stopwatch()
    pool = reward_pool(workspace, job.rewards, job.source_sha256)  # a new one imports while the rollouts are fetched
    _, rollouts_dir = workspace.fetch(job.rollouts)
    rollouts = Rollouts.load(rollouts_dir)
    with watch("score"):
        rewards, counts = score_rollouts(rollouts, pool)
        scores, shaping = compare(rollouts, rewards, job)
    workspace.injection.reach("work")
    with workspace.directory() as directory:
        scores.save(directory)
        summary = describe(scores, rollouts.group_ids, job.rewards) | counts | shaping
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def score_rollouts(rollouts: Rollouts, pool: RewardPool) -> tuple[Tensor, dict[str, float]]:
    """Rewards by function, [N, K], NaN where a completion could not be scored; and how many calls came to no end."""
    scored = pool.score([(text.completion, text.example) for text in rollouts.texts])
    counts: dict[str, float] = {"reward/timeouts": scored.num_timeouts, "reward/crashes": scored.num_crashes}
    return torch.tensor(scored.values, dtype=torch.float32), counts


def compare(rollouts: Rollouts, rewards: Tensor, job: ScoreJob) -> tuple[Scores, dict[str, float]]:
    """Total rewards and advantages from rewards [N, K], and what the overlong penalty and dropping have changed."""
    weights = torch.tensor([reward.weight for reward in job.rewards])
    total = (rewards * weights).sum(dim=1)  # [N], NaN when any function could not score
    shaping: dict[str, float] = {}
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
    advantages, keep = compute_advantages(inputs, load_function(job.advantage, "advantage"), is_valid)
    shaping["groups/without_valid_completion"] = len(rollouts.group_ids.unique()) - len(
        rollouts.group_ids[is_valid].unique()
    )
    return Scores(rewards=rewards, total=total, advantages=advantages, keep=keep), shaping


def reward_pool(workspace: Workspace, rewards: tuple[RewardConfig, ...], sources: dict[str, str]) -> RewardPool:
    """Worker processes for these functions: the warm ones if they hold the same sources, else new ones."""
    held: tuple[object, RewardPool] | None = workspace.held.get("rewards")
    if held is not None:
        if held[0] == (rewards, sources):
            return held[1]
        held[1].close()
    pool = RewardPool(rewards)
    workspace.held["rewards"] = ((rewards, sources), pool)
    return pool


def describe(scores: Scores, group_ids: Tensor, rewards: tuple[RewardConfig, ...]) -> dict[str, float]:
    """Reward and advantage statistics under their tracking names."""
    valid = scores.total[~scores.total.isnan()]
    if len(valid) == 0:
        raise ValueError(
            "no completion could be scored: for each one a reward function returned None, took too long or crashed; "
            "check the reward's input"
        )
    groups = group_ids.unique()
    num_informative = len(group_ids[scores.keep].unique())
    by_function = {
        f"reward_by_function/{reward.fn.rpartition(':')[2]}": scores.rewards[:, column].nanmean().item()
        for column, reward in enumerate(rewards)
    }
    return {
        "reward/mean": valid.mean().item(),
        "reward/std": valid.std(correction=0).item(),
        "reward/unscored": len(scores.total) - len(valid),
        "advantage/std": scores.advantages.std(correction=0).item(),
        "groups/informative": num_informative,
        "groups/uniform_fraction": 1 - num_informative / len(groups),
        **by_function,
    }
