"""Stage `score`: a rollout set -> rewards by function, their weighted total, and advantages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forge_core.advantages import advantages_by_group
from forge_core.artifacts import Manifest
from forge_core.config import FunctionConfig, RewardConfig
from forge_core.examples import Reward
from forge_core.functions import load_function
from forge_core.jobs import ScoreJob
from forge_core.rollouts import Rollouts, RolloutTexts, Scores
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: ScoreJob, workspace: Workspace) -> Manifest:
    """Score every completion with every reward function."""
    watch = Stopwatch()
    _, rollouts_dir = workspace.fetch(job.rollouts)
    rollouts = Rollouts.load(rollouts_dir)
    with watch("score"):
        rewards = score_rollouts(rollouts, job.rewards)
        weights = torch.tensor([reward.weight for reward in job.rewards])
        total = (rewards * weights).sum(dim=1)  # [N], NaN when any function could not score
        advantage = load_function(job.advantage, "advantage")
        advantages, keep = advantages_by_group(total, rollouts.group_ids, advantage)
    scores = Scores(rewards=rewards, total=total, advantages=advantages, keep=keep)
    with workspace.directory() as directory:
        scores.save(directory)
        summary = describe(scores, rollouts.group_ids, job.rewards)
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def score_rollouts(rollouts: Rollouts, rewards: tuple[RewardConfig, ...]) -> Tensor:
    """Rewards by function, [N, K]; NaN where a function returned None ("cannot be scored")."""
    columns = [load_function(reward, "reward") for reward in rewards]
    rows = [
        [call_reward(fn, config, text) for fn, config in zip(columns, rewards, strict=True)] for text in rollouts.texts
    ]
    return torch.tensor(rows, dtype=torch.float32)


def call_reward(fn: Reward, config: FunctionConfig, text: RolloutTexts) -> float:
    """One reward; NaN for None. Raises ValueError naming function and example when it raises or returns no number."""
    remedy = "fix the function, or let it return None for a completion that cannot be scored"
    try:
        value = fn(text.completion, text.example)
    except Exception as error:
        raise ValueError(f"reward {config.fn} raised {error!r} on example {text.example.id}; {remedy}") from error
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"reward {config.fn} returned {value!r} for example {text.example.id}; {remedy}")
    return float(value)


def describe(scores: Scores, group_ids: Tensor, rewards: tuple[RewardConfig, ...]) -> dict[str, float]:
    """Reward and advantage statistics under their tracking names."""
    valid = scores.total[~scores.total.isnan()]
    if len(valid) == 0:
        raise ValueError("no completion could be scored: every reward function returned None; check the reward's input")
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
