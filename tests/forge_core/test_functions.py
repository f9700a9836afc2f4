"""Functions named in a config are checked by reading their source, before anything is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from forge_core.config import FunctionConfig
from forge_core.functions import check_function, load_function, source_sha256

REWARDS = """
import torch_is_not_needed_to_check_this

def short(completion, example): return 1.0
def with_settings(completion, example, *, bonus=0.5, scale): return bonus * scale
def wrong(completion): return 1.0
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def check(fn: str, **kwargs) -> None:
    check_function(FunctionConfig(fn=fn, kwargs=kwargs), "reward")


def test_a_users_function_is_found_without_importing_its_module(user_module: Path):
    check("my_rewards:short")
    check("my_rewards:with_settings", scale=2, bonus=1)
    assert "my_rewards" not in sys.modules


@pytest.mark.parametrize(
    ("fn", "kwargs", "message"),
    [
        ("exact_numbr", {}, "exact_number"),
        ("my_rewards:shrt", {}, "defines no such function; it has short"),
        ("no_such_module:short", {}, "PYTHONPATH"),
        ("my_rewards:with_settings", {"scal": 1}, "no setting 'scal'; it has scale"),
        ("my_rewards:with_settings", {}, "needs kwargs scale"),
        ("my_rewards:wrong", {}, r"takes 1 positional arguments; a reward has the signature \(completion"),
    ],
)
def test_a_wrong_function_is_refused_with_a_remedy(user_module: Path, fn: str, kwargs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        check(fn, **kwargs)


def test_an_edited_function_is_another_function(user_module: Path):
    before = source_sha256(FunctionConfig(fn="my_rewards:short"), "reward")
    user_module.write_text(REWARDS.replace("1.0", "2.0"))
    assert source_sha256(FunctionConfig(fn="my_rewards:short"), "reward") != before


def test_keyword_arguments_reach_the_function():
    split = load_function(FunctionConfig(fn="arithmetic", kwargs={"max_number": 1, "test_fraction": 0.0}), "dataset")
    assert [example.id for example in split()] == ["0+0=", "0+1=", "1+0=", "1+1="]
