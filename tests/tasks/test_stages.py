"""Which failures are tried again."""

from __future__ import annotations

import pytest
from prefect.states import Failed

from forge_core.artifacts import ArtifactError
from forge_core.stages.process import StageError
from tasks.stages import is_transient


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StageError("update", "died", "killed by SIGKILL"), True),
        (StageError("rollout", "timeout", "too slow"), True),
        (StageError("sft", "OSError", "connection reset"), True),
        (ConnectionError("store"), True),
        (StageError("sft", "ValueError", "wrong setting"), False),
        (StageError("update", "NonFiniteError", "loss is nan"), False),
        (ArtifactError("damaged"), False),
        (ValueError("wrong setting"), False),
    ],
)
def test_only_what_another_attempt_can_cure_is_tried_again(error: Exception, expected: bool):
    assert is_transient(None, None, Failed(data=error)) is expected  # type: ignore[arg-type]
