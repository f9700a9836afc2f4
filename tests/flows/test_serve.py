"""A published policy answered with by vLLM, from a deployment on a worker, until that run is cancelled."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.states import Cancelling

from deployments.local_service import Service, free_port
from forge_core import publication
from forge_core.plan import Plan
from forge_core.serve_config import ServeConfig
from tasks.processes import stage_processes
from tests.flows.deployed import finished, start_run
from tests.pipeline import COLD, in_processes, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def publish_fresh(root: str, seed: int) -> None:
    """Publish a policy of random weights under the name `served`."""
    config = tiny_config(root, seed=seed, keep_warm=COLD)
    with stage_processes(config, logging.getLogger("serve")) as processes:
        policy = in_processes(processes)(Plan(config, f"seed{seed}").start())
    publication.publish(root, "served", policy, run_id=f"seed{seed}", metrics={})


def complete(port: int) -> dict | None:
    """A greedy completion, None while nobody answers."""
    body = {"model": "served", "prompt": "1+1=", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except (OSError, urllib.error.HTTPError):
        return None


def wait_for(model: str, port: int) -> dict:
    """The first completion that this version gives."""
    while (answer := complete(port)) is None or answer["model"] != model:  # the test's own time limit ends this
        time.sleep(0.5)
    return answer


def test_a_promoted_policy_answers_the_next_one_follows_and_a_cancelled_run_leaves_nothing(
    worker: Service, seaweed_s3: str
):
    config = ServeConfig(
        name="served", root=f"{seaweed_s3}/serve", port=free_port(), poll_seconds=1, drain_seconds=0,
        generator=tiny_config(seaweed_s3).generator,
    )  # fmt: skip
    publish_fresh(config.root, seed=0)
    run = start_run(config, None, "serve/quickstart")
    first = wait_for("served@v0001", config.port)
    publish_fresh(config.root, seed=1)
    second = wait_for("served@v0002", config.port)
    assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == 4
    flow = psutil.Process(worker.pid).children(recursive=True)
    servers = [process for process in flow if "forge_core.stages.api_server" in process.cmdline()]
    assert len(servers) == 1
    started = [*servers, *servers[0].children(recursive=True)]
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling(), force=True)
    _gone, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert finished(run).state_name == "Cancelled"
