"""Rewards over whole batches: all completions at once, in a process of their own, and what they report."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forge_core.config import FunctionConfig, RewardConfig
from forge_core.examples import Example, Message
from forge_core.functions import is_over_batch
from forge_core.rewards.pool import RewardPool

REWARDS = """
import os
from forge_core.examples import BatchRewards

def number(completion, example):
    return None if completion == "" else float(completion)

def whole(completions: list[str], examples) -> list[float | None]:
    "How many completions came at once, for each; other words are misdeeds."
    if "loop" in completions:
        while True: pass
    if "exit" in completions: os._exit(3)
    if "offline" in completions: raise ConnectionError("nobody is there")
    if "few" in completions: return [1.0]
    values = [None if text == "" else float(len(completions)) for text in completions]
    return BatchRewards(values, {"pid": os.getpid()})
"""
EXAMPLE = Example(id="e7", messages=(Message(role="user", content="1+1="),), answer="2")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardPool]]:
    """Start pools that are closed after the test."""
    (tmp_path / "hostile.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    pools: list[RewardPool] = []

    def _start(*fns: str, num_workers: int = 1, timeout_seconds: float = 60.0) -> RewardPool:
        rewards = [RewardConfig(fn=f"hostile:{fn}", timeout_seconds=timeout_seconds) for fn in fns]
        pools.append(RewardPool(rewards, num_workers=num_workers))
        return pools[-1]

    yield _start
    for pool in pools:
        pool.close()


def rows(*completions: str) -> list[tuple[str, Example]]:
    return [(completion, EXAMPLE) for completion in completions]


def column(values: list[list[float]], place: int = 0) -> list[float | None]:
    return [None if math.isnan(row[place]) else row[place] for row in values]


def test_a_function_over_the_whole_batch_gets_it_at_once_in_a_worker_that_stays(start):
    pool = start("number", "whole", num_workers=2)
    scored = pool.score(rows(*["1"] * 199, ""))
    assert column(scored.values, 1) == [200.0] * 199 + [None]
    assert column(scored.values) == [1.0] * 199 + [None]
    again = pool.score(rows("5", "6"))
    assert again.values == [[5.0, 2.0], [6.0, 2.0]]
    assert scored.metrics["whole/pid"] == again.metrics["whole/pid"] in pool.pids


@pytest.mark.parametrize(
    ("misdeed", "error", "message"),
    [
        ("loop", ValueError, r"whole, which scores a batch as a whole \(2 .* longer than timeout_seconds = 1 for each"),
        ("exit", ValueError, r"whole \(2 completions\), ended its process, which exited with code 3"),
        ("few", ValueError, r"hostile:whole returned 1 values for 2 completions"),
        ("offline", ConnectionError, r"reward hostile:whole: nobody is there"),
    ],
)
def test_a_batch_that_fails_as_a_whole_is_an_error(start, misdeed, error, message):
    pool = start("whole", timeout_seconds=1)
    with pytest.raises(error, match=message):
        pool.score(rows("1", misdeed))
    assert pool.score(rows("1")).values == [[1.0]]


def test_two_functions_of_one_name_report_under_two(start):
    assert start("whole", "whole").score(rows("1")).metrics.keys() == {"whole/pid", "whole_1/pid"}


def test_what_the_first_argument_is_declared_as_decides_who_gets_a_batch(start):
    start()
    assert is_over_batch(FunctionConfig(fn="hostile:whole"), "reward")
    assert is_over_batch(FunctionConfig(fn="judge"), "reward")
    assert not is_over_batch(FunctionConfig(fn="hostile:number"), "reward")
    assert not is_over_batch(FunctionConfig(fn="exact_number"), "reward")
