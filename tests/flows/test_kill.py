"""What is left when a deployment run is cancelled or everything that runs it is killed, and how it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import AwaitingRetry, Cancelling, Crashed

from deployments.local_service import Service
from forge_core import storage
from forge_core.artifacts import read_manifest
from forge_core.config import PostTrainConfig
from forge_core.operation import NotifyConfig
from forge_core.plan import Plan
from tests.flows.deployed import finished, start_run
from tests.pipeline import policies, run_pipeline, tiny_config, weights_sha256
from tests.webhook import Webhook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CANCELLED_WITHIN_SECONDS = 10


def started_by(worker: Service) -> list[psutil.Process]:
    """The flow processes of a worker and the stage processes of those."""
    return psutil.Process(worker.pid).children(recursive=True)


def wait_for(config: PostTrainConfig, run_id: str, artifact: str) -> None:
    """Return when a run has committed an artifact."""
    uri = f"{Plan(config, run_id).run_uri}/{artifact}"
    while read_manifest(uri) is None:  # the test's own time limit ends this
        time.sleep(0.2)


def set_state(run: FlowRun, state) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, state, force=True)


def test_a_cancelled_run_leaves_no_process_within_ten_seconds(worker: Service, seaweed_s3: str):
    config = tiny_config(f"{seaweed_s3}/cancelled")
    run = start_run(config, "cancelled")
    wait_for(config, "cancelled", "policies/v0001")
    processes = [process for process in started_by(worker) if "forge_core.stages" in process.cmdline()]
    assert len(processes) == 3
    set_state(run, Cancelling())
    cancelled_at = time.monotonic()
    _gone, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert time.monotonic() - cancelled_at < CANCELLED_WITHIN_SECONDS
    assert finished(run).state_name == "Cancelled"


def test_a_run_whose_every_process_was_killed_goes_on_when_it_is_retried(
    start_worker: Callable[..., Service], seaweed_s3: str, tmp_path: Path
):
    config = tiny_config(f"{seaweed_s3}/killed")
    expected = weights_sha256(run_pipeline(tiny_config(str(tmp_path)), "undisturbed"))
    with start_worker() as worker:
        run = start_run(config, "killed")
        wait_for(config, "killed", "rollouts/v0002")
        victims = [psutil.Process(worker.pid), *started_by(worker)]
        assert len(victims) >= 5  # worker, flow, three stages
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
    kept = policies(Plan(config, "killed"))
    assert 2 <= len(kept) < len(expected)
    with start_worker():
        # Nobody is left to report the death; an automation on missing heartbeats, or a person, does what follows.
        set_state(run, Crashed(message="killed by a test"))
        set_state(run, AwaitingRetry())  # the Retry button
        ended = finished(run)
    assert ended.state_name == "Completed"
    assert ended.id == run.id
    made = policies(Plan(config, "killed"))
    assert weights_sha256(made) == expected
    assert made[: len(kept)] == kept  # manifests and all: what was there was not made again


def test_people_hear_of_a_run_whose_process_was_killed(
    start_worker: Callable[..., Service], webhook: Webhook, seaweed_s3: str
):
    config = tiny_config(f"{seaweed_s3}/crashed", notify=NotifyConfig(url_env="KILLED_WEBHOOK"))
    with start_worker(KILLED_WEBHOOK=webhook.url) as worker:
        run = start_run(config, "crashed")
        while not storage.exists(f"{Plan(config, 'crashed').run_uri}/run.json"):
            time.sleep(0.2)
        [flow] = psutil.Process(worker.pid).children()
        flow.kill()
        while not webhook.received:  # the test's own time limit ends this
            time.sleep(0.2)
    [told] = webhook.received
    assert (told["event"], told["run_id"], told["flow_run_id"]) == ("crashed", "crashed", str(run.id))
