"""Scoring: what is stored and counted, also when a reward hangs; and worker processes that stay warm between jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forge_core import artifacts
from forge_core.artifacts import Ref
from forge_core.config import FunctionConfig, OverlongConfig, RewardConfig
from forge_core.examples import Example, Message
from forge_core.jobs import ScoreJob
from forge_core.rewards.overlong import overlong_penalties
from forge_core.rollouts import Rollouts, RolloutTexts, Scores
from forge_core.stages import rollout, score
from forge_core.stages.score import describe
from forge_core.stages.workspace import Workspace
from forge_core.update_config import KlConfig

EXAMPLE = Example(id="e7", messages=(Message(role="user", content="1+1="),), answer="2")
REWARDS = """
import os

def reward(completion, example):
    "1 for the answer; the module's other words are misdeeds."
    while completion == "loop": pass
    if completion == "exit": os._exit(3)
    return None if completion == "abstain" else float(completion == example.answer)
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path / "scratch")
    workspace.scratch.mkdir()
    yield workspace
    if "rewards" in workspace.held:
        workspace.held["rewards"][1].close()


@pytest.fixture
def score_job(tmp_path: Path) -> Callable[..., ScoreJob]:
    """Jobs that score these completions, two to a group."""

    def _job(name: str, *completions: str, source: str = "1", timeout_seconds: float = 60.0) -> ScoreJob:
        rewards = (RewardConfig(fn="mine:reward", timeout_seconds=timeout_seconds),)
        return ScoreJob(
            output=(tmp_path / name / "scored").as_uri(),
            rollouts=_commit_rollouts(tmp_path / name, completions),
            rewards=rewards,
            advantage=FunctionConfig(fn="group_mean"),
            source_sha256={"mine:reward": source},
        )

    return _job


def _commit_rollouts(place: Path, completions: tuple[str, ...]) -> Ref:
    directory, num_rows = place / "files", len(completions)
    directory.mkdir(parents=True)
    Rollouts(
        token_ids=torch.zeros(2 * num_rows, dtype=torch.int64),
        generator_logprobs=torch.zeros(2 * num_rows),
        offsets=torch.arange(0, 2 * num_rows + 1, 2),
        prompt_lengths=torch.ones(num_rows, dtype=torch.int64),
        group_ids=torch.arange(num_rows) // 2,
        texts=tuple(RolloutTexts(EXAMPLE, completion, "stop") for completion in completions),
    ).save(directory)
    nothing: dict = {"job": {}, "inputs": {}, "summary": {}, "software": {}, "timings": {}}
    uri = (place / "rollouts").as_uri()
    return artifacts.commit(directory, uri, kind="rollouts", job_digest="0", **nothing).ref


def run(job: ScoreJob, workspace: Workspace) -> tuple[dict, Scores]:
    """What a score job has committed: its summary and its scores."""
    workspace.begin_job(job)
    manifest = score.run(job, workspace)
    _, directory = workspace.fetch(manifest.ref)
    return manifest.summary, Scores.load(directory)


def test_a_completion_whose_reward_hangs_is_left_out_and_counted(score_job, workspace):
    job = score_job("a", "2", "3", "loop", "2", "exit", "abstain", timeout_seconds=2)
    summary, scores = run(job, workspace)
    assert scores.rewards.nan_to_num(-1).tolist() == [[1], [0], [-1], [1], [-1], [-1]]
    assert scores.keep.tolist() == [True, True, False, False, False, False]  # no second score in their groups
    # The first group: its rewards minus their mean, 1/2.
    assert scores.advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]
    assert (summary["reward/timeouts"], summary["reward/crashes"], summary["reward/unscored"]) == (1, 1, 3)
    assert summary["reward/mean"] == pytest.approx(2 / 3)


def test_workers_stay_warm_between_jobs_until_the_source_of_a_reward_changes(score_job, workspace, tmp_path: Path):
    def pids_after(job: ScoreJob) -> list[int]:
        assert run(job, workspace)[1].rewards.tolist() == [[1.0], [0.0]]
        return workspace.held["rewards"][1].pids

    first = pids_after(score_job("a", "2", "3"))
    assert pids_after(score_job("b", "2", "5")) == first
    (tmp_path / "mine.py").write_text(REWARDS.replace("== example.answer", "!= example.answer"))
    assert pids_after(score_job("c", "3", "2", source="2")) != first


def test_what_could_not_be_scored_is_counted_and_in_no_mean():
    scores = Scores(
        rewards=torch.tensor([[1.0], [0.0], [math.nan], [1.0]]),
        total=torch.tensor([1.0, 0.0, math.nan, 1.0]),
        advantages=torch.zeros(4),
        keep=torch.tensor([True, True, False, False]),
    )
    summary = describe(scores, (RewardConfig(fn="mine:reward"),))
    assert summary["reward/mean"] == pytest.approx(2 / 3)  # of the three that could be scored
    assert summary["reward/unscored"] == 1
    assert summary["reward_by_function/reward"] == pytest.approx(2 / 3)


def compared(
    lengths: list[int],
    rewards: list[float],
    *,
    finish: list[str] | None = None,
    distance: list[float] | None = None,
    **settings,
):
    """Scores and counts of completions of these lengths and rewards, two to a group.

    `distance` is how much less likely the reference policy finds each of their tokens, nats.
    """
    job = ScoreJob(
        output="memory://scored",
        rollouts=Ref(kind="rollouts", uri="memory://rollouts", digest="0" * 64),
        rewards=(RewardConfig(fn="mine:reward"),),
        advantage=FunctionConfig(fn="group_mean"),
        source_sha256={},
        **settings,
    )
    reference = None
    if distance is not None:
        # Prompts differ as well, and must not count.
        reference = -torch.tensor(distance).repeat_interleave(torch.tensor(lengths) + 1)
    return score.compare(rollouts_of(lengths, finish), torch.tensor(rewards)[:, None], job, reference)


def rollouts_of(lengths: list[int], finish: list[str] | None = None) -> Rollouts:
    """Completions of these lengths after prompts of one token, two to a group."""
    count = len(lengths)
    return Rollouts(
        token_ids=torch.zeros(sum(lengths) + count, dtype=torch.int64),
        generator_logprobs=torch.zeros(sum(lengths) + count),
        offsets=torch.tensor([0, *lengths]).cumsum(0) + torch.arange(count + 1),
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        group_ids=torch.arange(count) // 2,
        texts=tuple(RolloutTexts(EXAMPLE, "", reason) for reason in finish or ["stop"] * count),
    )


def test_overlong_completions_lose_reward_from_the_start_of_the_buffer_to_the_limit():
    # Limit 100, buffer 20: nothing up to 80, then 1/20 a token, never more than 1.
    lengths = torch.tensor([1, 80, 81, 90, 100, 120])
    found = overlong_penalties(lengths, max_tokens=100, buffer_tokens=20)
    torch.testing.assert_close(found, torch.tensor([0, 0, -0.05, -0.5, -1, -1]))


def test_the_overlong_penalty_is_part_of_the_total_and_of_the_advantages():
    overlong = OverlongConfig(buffer_tokens=4, penalty=0.5)
    scores, counts = compared([6, 8, 10, 3], [1.0, 1, 0, 0], overlong=overlong, max_tokens=10)
    assert scores.total.tolist() == [1.0, 0.75, -0.5, 0.0]
    assert scores.rewards[:, 0].tolist() == [1, 1, 0, 0]
    assert scores.advantages.tolist() == [0.125, -0.125, -0.25, 0.25]
    assert counts["reward/overlong_penalty"] == pytest.approx((-0.25 - 0.5) / 4)


def test_truncated_completions_are_dropped_as_if_they_had_not_been_sampled_and_counted():
    # As long as one that was cut off, but ended by itself: it stays.
    finish = ["stop", "stop", "length", "stop", "length", "length"]
    scores, counts = compared([4, 4, 4, 4, 4, 4], [1.0, 0, 1, 0, 1, 0], finish=finish, drop_truncated=True)
    assert scores.keep.tolist() == [True, True, False, False, False, False]
    assert scores.advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]
    assert (counts["completion/dropped_truncated"], counts["groups/without_valid_completion"]) == (3, 1)


def test_an_empty_completion_keeps_its_reward_and_counts_in_its_group():
    scores, _ = compared([0, 3], [1.0, 0.0])
    assert scores.total.tolist() == [1, 0]
    assert scores.advantages.tolist() == [0.5, -0.5]
    assert scores.keep.tolist() == [True, True]


def test_lengths_are_those_of_all_completions_truncated_ones_included():
    example = RolloutTexts(EXAMPLE, "", "stop")
    rollouts = Rollouts(
        token_ids=torch.zeros(17, dtype=torch.int64),
        generator_logprobs=torch.zeros(17),
        offsets=torch.tensor([0, 6, 10, 15, 17]),
        prompt_lengths=torch.ones(4, dtype=torch.int64),
        group_ids=torch.tensor([0, 0, 1, 1]),
        texts=(RolloutTexts(EXAMPLE, "", "length"), example, example, example),
    )
    summary = rollout.describe(rollouts, 1.0)
    assert summary["completion/length/mean"] == 3.25  # 5, 3, 4, 1
    assert summary["completion/length/terminated_mean"] == pytest.approx(8 / 3)
    assert summary["completion/truncated_fraction"] == 0.25


def test_truncated_completions_stay_unless_told_otherwise():
    scores, counts = compared([4, 4], [1.0, 0], finish=["length", "length"])
    assert scores.keep.tolist() == [True, True]
    assert "completion/dropped_truncated" not in counts


def test_the_distance_from_the_reference_policy_lowers_the_reward_by_its_sum_over_the_completion():
    kl = KlConfig(coefficient=0.5, place="reward")
    scores, counts = compared([3, 2], [1.0, 1.0], distance=[0.2, -0.1], kl=kl)
    assert scores.total.tolist() == pytest.approx([1 - 0.5 * 3 * 0.2, 1 + 0.5 * 2 * 0.1])  # k1 may be negative
    assert scores.rewards[:, 0].tolist() == [1, 1]
    assert counts["reward/kl_penalty"] == pytest.approx(0.5 * (0.6 - 0.2) / 2)
    assert scores.keep.all()
    squared, _ = compared([3, 2], [1.0, 1.0], distance=[0.2, -0.1], kl=kl.model_copy(update={"estimator": "k2"}))
    assert squared.total.tolist() == pytest.approx([1 - 0.5 * 3 * 0.02, 1 - 0.5 * 2 * 0.005])


def test_penalties_make_no_group_worth_keeping_when_spread_is_that_of_the_rewards():
    overlong = OverlongConfig(buffer_tokens=4)
    settings = {"overlong": overlong, "max_tokens": 10, "spread_of": "rewards"}
    scores, counts = compared([8, 9, 2, 9, 10, 10], [1.0, 1, 1, 0, math.nan, 1], **settings)
    assert scores.keep.tolist() == [False, False, True, True, False, False]
    assert counts["groups/informative"] == 1
    assert counts["groups/uniform_fraction"] == pytest.approx(2 / 3)
    assert scores.advantages[:2].tolist() == pytest.approx([0.125, -0.125])  # which nothing trains on


def test_groups_without_a_spread_are_kept_on_request_and_counted_all_the_same():
    scores, counts = compared([4] * 6, [1.0, 1, 1, 0, math.nan, 1], drop_uniform=False)
    assert scores.keep.tolist() == [True, True, True, True, False, True]
    assert scores.advantages.tolist() == [0, 0, 0.5, -0.5, 0, 0]
    assert (counts["groups/informative"], counts["groups/without_valid_completion"]) == (1, 0)


def test_a_gated_reward_counts_where_its_gate_is_open():
    configs = (RewardConfig(fn="right"), RewardConfig(fn="form", weight=0.2, gate="right"))
    rewards = torch.tensor([[1.0, 1.0], [0.5, 1.0], [0.0, math.nan], [math.nan, 1.0], [1.0, 0.3]])
    found = score.gated(rewards, configs)
    assert found.nan_to_num(-1).tolist() == [[1, 1], [0.5, 0], [0, -1], [-1, 1], [1, pytest.approx(0.3)]]
    assert rewards[1, 1] == 1  # a copy


def test_a_group_of_wrong_answers_learns_nothing_from_their_form_behind_a_gate():
    rewards = (RewardConfig(fn="mine:reward"), RewardConfig(fn="mine:form", weight=0.2, gate="mine:reward"))
    job = ScoreJob(
        output="memory://scored",
        rollouts=Ref(kind="rollouts", uri="memory://rollouts", digest="0" * 64),
        rewards=rewards,
        advantage=FunctionConfig(fn="group_mean"),
        source_sha256={},
    )
    values = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    scores, _ = score.compare(rollouts_of([4] * 4), values, job)
    assert scores.total.tolist() == pytest.approx([0, 0, 1.2, 1])
    assert scores.keep.tolist() == [False, False, True, True]
