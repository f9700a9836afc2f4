"""What is done about each class of failure."""

from __future__ import annotations

import pytest
from prefect.states import Failed

from forge_core.artifacts import ArtifactError
from forge_core.stages.process import StageError
from forge_core.storage_errors import StorageUnavailableError
from tasks.failures import StageStoppedError, failure_class, is_retried, stopped
from tasks.stages import may_be_cured


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StageError("update", "died", "killed by SIGKILL"), "died"),
        (StageError("rollout", "EngineDeadError", "engine core died"), "died"),
        (StageError("rollout", "timeout", "too slow"), "timeout"),
        (StageError("update", "OutOfMemory", "CUDA out of memory"), "out_of_memory"),
        (StageError("update", "NonFiniteError", "loss is nan"), "not_finite"),
        (StageError("sft", "StorageUnavailable", "503"), "storage"),
        (StorageUnavailableError("503"), "storage"),
        (ConnectionResetError("store"), "storage"),
        (StageError("sft", "ValueError", "wrong setting"), "permanent"),
        (StageError("sft", "ArtifactError", "damaged"), "permanent"),
        (StageError("sft", "OSError", "no space left on device"), "permanent"),
        (ArtifactError("damaged"), "permanent"),
        (ValueError("wrong setting"), "permanent"),
        (StageStoppedError("used up"), "permanent"),
    ],
)
def test_every_failure_has_a_class_and_prefect_retries_all_but_the_permanent_ones(error: Exception, expected: str):
    assert failure_class(error) == expected
    assert may_be_cured(None, None, Failed(data=error)) is (expected != "permanent")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cause", "retries"), [("died", 3), ("timeout", 1), ("NonFiniteError", 1), ("OutOfMemory", 4), ("ValueError", 0)]
)
def test_a_class_is_retried_so_often_and_no_more(cause: str, retries: int):
    error = StageError("update", cause, "x")
    assert [is_retried(error, earlier) for earlier in range(retries + 1)] == [True] * retries + [False]


def test_the_last_word_says_what_was_tried():
    error = StageError("update", "NonFiniteError", "loss is nan. Rollouts s3://b/run/rollouts/v0003")
    message = str(stopped(error, "update v0004", 1))
    assert "update v0004 stopped (not_finite), after 2 attempts" in message
    assert "s3://b/run/rollouts/v0003" in message
    assert "no retry can cure" in str(stopped(ValueError("a setting"), "sft v0001", 0))
