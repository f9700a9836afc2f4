"""A run whose process is gone does not stay Running."""

from __future__ import annotations

import time

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Running

from deployments.automations import apply, automations
from deployments.local_service import Service

SILENT_SECONDS = 10  # the shortest that Prefect takes


@flow(name="silent")
def silent() -> None: ...


@pytest.mark.slow
def test_a_run_that_falls_silent_is_marked_crashed_and_other_runs_are_left_alone(prefect_server: Service):
    wanted = automations(SILENT_SECONDS, tag="watched")
    assert set(apply(wanted).values()) == {"created"}
    assert set(apply(wanted).values()) == {"updated"}
    with get_client(sync_client=True) as client:
        assert [len(client.read_automations_by_name(automation.name)) for automation in wanted] == [1, 1]
        # As a process leaves them that is killed before its first heartbeat.
        watched, foreign = (
            client.create_flow_run(silent, tags=[tag], state=Running()) for tag in ("watched", "somebody-else")
        )
        deadline = time.monotonic() + 120
        while not (run := client.read_flow_run(watched.id)).state.is_final():
            assert time.monotonic() < deadline, prefect_server.log_tail()
            time.sleep(1)
        assert run.state.is_crashed()
        assert run.state.message == "no heartbeat for 10 s: its process or its machine is gone"
        assert client.read_flow_run(foreign.id).state.is_running()
