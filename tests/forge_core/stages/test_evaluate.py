"""What an evaluation makes of completions: every problem counts once, and what a reward cannot score is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.artifacts import Ref
from forge_core.config import FunctionConfig, RewardConfig
from forge_core.eval_config import EvalConfig
from forge_core.examples import Example, Message
from forge_core.functions import find_extractor
from forge_core.generator import Completion
from forge_core.graded import describe
from forge_core.plan import Plan
from forge_core.rewards.pool import RewardPool
from forge_core.stages.evaluate import judge, report_on, require_enough, tracked
from tests.pipeline import tiny_config

REWARDS = """
import os

def reward(completion, example, *, words="."):
    "1 for the answer; the module's other words are misdeeds."
    while completion == "loop": pass
    if completion == "exit": os._exit(3)
    return None if completion == "abstain" else float(completion == example.answer)

def reward_answer(completion, example, *, words="."):
    return completion.strip(words) or None

def other(completion, example):
    return 0.5

def wrong(completion, example):
    return 0.5

def wrong_answer(completion, example):
    return 3

def differs(completion, example, *, limit=1):
    return 0.5

def differs_answer(completion, example):
    return None
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def start() -> Iterator:
    pools: list[RewardPool] = []

    def _start(fn: str, timeout_seconds: float = 60.0) -> RewardPool:
        config, extractor = RewardConfig(fn=fn, timeout_seconds=timeout_seconds), find_extractor(FunctionConfig(fn=fn))
        extractors = {fn: extractor} if extractor else {}
        pools.append(RewardPool([config], num_workers=1, extractors=extractors))
        return pools[-1]

    yield _start
    for pool in pools:
        pool.close()


def example(name: str, answer: str = "2") -> Example:
    return Example(id=name, messages=(Message(role="user", content="1+1="),), answer=answer)


def group(*texts: str) -> tuple[Completion, ...]:
    return tuple(Completion((1, 2), (0.0, 0.0), "stop", text) for text in texts)


def test_a_completion_whose_reward_hangs_is_wrong_and_counted(start):
    problems, scored = judge(
        [example("a"), example("b")],
        [group("2", "2", "loop"), group("loop", "2", "abstain")],
        start("answering:reward", timeout_seconds=2),
    )
    assert [(one.is_right, one.num_right) for one in problems] == [(True, 1), (False, 1)]
    assert (scored.num_timeouts, scored.num_crashes) == (2, 0)
    found = describe(problems, votes=True)
    assert (found["accuracy"], found["pass_at_1"], found["unscored"]) == (0.5, 0.5, 3)


def test_the_answers_that_are_voted_on_come_from_the_function_beside_the_reward(start):
    problems, _ = judge([example("a")], [group("2.", "2", "...", "exit")], start("answering:reward"))
    [one] = problems
    assert [sample.extracted for sample in one.samples] == ["2", None, None]
    assert (one.extracted, one.is_right) == ("2", False)


def test_a_reward_without_such_a_function_has_none(start):
    assert find_extractor(FunctionConfig(fn="answering:other")) is None
    [one], _ = judge([example("a")], [group("2", "2")], start("answering:other"))
    assert (one.extracted, one.reward, one.is_right) == (None, 0.5, False)


def test_an_answer_that_is_no_text_is_an_error_with_a_name(start):
    with pytest.raises(ValueError, match="answering:wrong_answer returned 3 for example a; let it return a text"):
        judge([example("a")], [group("2", "2")], start("answering:wrong"))


def test_a_function_for_answers_that_takes_other_settings_than_its_reward_is_refused():
    with pytest.raises(ValueError, match="reward answering:differs_answer has no setting 'limit'"):
        find_extractor(FunctionConfig(fn="answering:differs", kwargs={"limit": 2}))


@pytest.mark.parametrize("reward", ["exact_number", "gsm8k", "boxed", "math", "reasoning_gym"])
def test_built_in_rewards_for_answers_say_what_they_are(reward: str):
    assert find_extractor(FunctionConfig(fn=reward))


def test_ten_problems_are_ten_whatever_the_number_that_is_worked_on_at_once(start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge_core.rewards.pool.MAX_BATCH", 4)
    examples = [example(str(number), str(number)) for number in range(10)]
    groups = [group(str(number), str(number % 2)) for number in range(10)]
    problems, _ = judge(examples, groups, start("answering:reward"))
    found = describe(problems, votes=True)
    assert (found["num_examples"], len({one.id for one in problems})) == (10, 10)
    assert (found["accuracy"], found["pass_at_1"]) == (1.0, 0.2)  # 0 and 1 of ten


def test_too_few_problems_are_an_error_and_no_smaller_denominator():
    with pytest.raises(ValueError, match=r"evals.heldout.num_examples is 11, but the dataset holds 10; lower it"):
        require_enough(10, EvalConfig(num_examples=11))


def test_the_report_has_the_settings_of_the_evaluation_and_not_those_of_rollouts(start, tmp_path: Path):
    config = tiny_config(str(tmp_path))  # rollouts: temperature 1, 4 tokens, 4 a group
    reward = FunctionConfig(fn="answering:other")
    evaluation = EvalConfig(max_tokens=9, pass_k=2, temperature=0.6, top_p=0.95, top_k=20, stop=("!",), reward=reward)
    refs = [Ref(kind=kind, uri=f"memory://{kind}", digest=kind * 8) for kind in ("policy", "dataset")]
    job = Plan(config, "run").evaluate(*refs, evaluation)
    problems, scored = judge([example("a")], [group("2", "2", "2")], start("answering:other"))
    report = report_on(problems, job, None)
    assert report.sampled.model_dump() == {
        "max_tokens": 9,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "stop": ("!",),
    }
    assert report.greedy.model_dump() == {"max_tokens": 9, "temperature": 0, "top_p": 1, "top_k": 0, "stop": ("!",)}
    assert (report.num_samples, report.num_examples, report.policy) == (2, 1, refs[0].digest)
    [note] = report.notes
    assert note.startswith("no majority@2: beside the reward answering:other there is no function")
    assert tracked(report, scored)["eval/heldout/accuracy"] == 0.0
