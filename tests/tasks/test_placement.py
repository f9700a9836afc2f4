"""What the end of a stage's flow run means to the run that sent it."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from forge_core.plan import Plan
from forge_core.stages.process import StageError
from tasks.failures import failure_class
from tasks.placement import outcome
from tests.pipeline import tiny_config


@pytest.mark.parametrize(
    ("state", "failure", "words"),
    [
        (Crashed(message="killed"), "died", "in pool spot crashed: killed"),
        (Failed(name="died", message="SIGKILL"), "died", "in pool spot: SIGKILL"),
        (Failed(name="timeout", message="late"), "timeout", "late"),
        (Failed(name="OutOfMemory", message="CUDA"), "out_of_memory", "CUDA"),
        (Failed(name="StorageUnavailable", message="503"), "storage", "503"),
        (Failed(name="ValueError", message="no such column"), "permanent", "no such column"),
        (Failed(message="another version"), "permanent", "another version"),
        (Cancelled(), "permanent", "was cancelled; retry this run"),
        (Completed(), "permanent", "cannot be seen from here; root must be a store that both machines reach"),
    ],
)
def test_the_end_of_a_flow_run_has_the_class_of_what_happened_there(
    state: State, failure: str, words: str, tmp_path: Path
):
    config = tiny_config(str(tmp_path))
    job = Plan(config, "run").dataset(config.grpo.dataset)
    child = FlowRun(flow_id=uuid4(), state=state, work_pool_name="spot")
    found = outcome(job, child)
    assert isinstance(found, StageError)
    assert failure_class(found) == failure
    assert words in str(found)
