"""The published quantized policy moves forward and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core import artifacts
from forge_core.artifacts import Ref
from forge_core.quantization.promotion import promote, read_publication, roll_back

NAME = "policy-quantized"


def policy(root: str, name: str, tmp_path: Path) -> Ref:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "content").write_text(name)
    return artifacts.commit(
        directory,
        f"{root}/run/quantized/{name}",
        kind="quantized_policy",
        job={},
        job_digest=name,
        inputs={},
        summary={},
        software={},
        timings={},
    ).ref


def current(root: str) -> Ref:
    found = read_publication(root, NAME, "current")
    assert found is not None
    return found.policy


def test_a_rollback_restores_the_previous_policy_and_a_second_one_undoes_it(root: str, tmp_path: Path):
    first, second = policy(root, "first", tmp_path), policy(root, "second", tmp_path)
    for one in (first, second, second):  # published again by a retry, the second must not become its own previous one
        promote(root, NAME, one, run_id="run", metrics={})
    assert current(root) == second
    assert roll_back(root, NAME).policy == first == current(root)
    assert roll_back(root, NAME).policy == second == current(root)


def test_there_is_nothing_to_roll_back_to_after_the_first_publication(root: str, tmp_path: Path):
    promote(root, NAME, policy(root, "first", tmp_path), run_id="run", metrics={})
    with pytest.raises(ValueError, match="no previous policy"):
        roll_back(root, NAME)
