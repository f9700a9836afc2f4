"""A server that follows a published name; the server itself is a small process that answers like one."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from deployments.local_service import free_port
from forge_core import publication, storage
from forge_core.manifests import find
from forge_core.plan import Plan
from forge_core.serve_config import ServeConfig
from forge_core.serving import Served, ServerError, Serving
from forge_core.stages.api_server import command_line
from tests.pipeline import tiny_config
from tests.stored_runs import store_run

STAND_IN = Path(__file__).parent / "stand_in_server.py"


def stand_in(policy: Path, config: ServeConfig, names: Sequence[str]) -> list[str]:
    return [sys.executable, str(STAND_IN), str(policy), str(config.port), *names]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A run whose third policy no server can load."""
    return store_run(tiny_config(str(tmp_path / "store"), name="tiny"), "run", spoiled=("policies/v0002",))


@pytest.fixture
def config(plan: Plan) -> ServeConfig:
    return ServeConfig(name="tiny", root=plan.config.root, port=free_port(), unhealthy_seconds=1e-9, drain_seconds=0)


@pytest.fixture
def serving(config: ServeConfig, tmp_path: Path) -> Iterator[Serving]:
    started = Serving(config, tmp_path / "scratch", logging.getLogger("serve"), command=stand_in)
    yield started
    started.close()


def publish(plan: Plan, version: int) -> None:
    policy = find(f"{plan.run_uri}/policies/v{version:04d}")
    publication.publish(plan.config.root, "tiny", policy, run_id="run", metrics={})


def models(config: ServeConfig) -> list[str]:
    """What the server says it serves."""
    with urllib.request.urlopen(f"http://127.0.0.1:{config.port}/v1/models", timeout=5) as answer:
        return [model["id"] for model in json.loads(answer.read())["data"]]


def pid(serving: Serving) -> int:
    assert serving.pid is not None
    return serving.pid


def served(serving: Serving) -> Served:
    assert serving.served is not None
    return serving.served


def test_a_server_follows_promotions_and_rollbacks_on_one_port(plan: Plan, config: ServeConfig, serving: Serving):
    publish(plan, 0)
    assert serving.look()
    assert models(config) == ["tiny@v0001", "tiny"]
    first = pid(serving)
    assert not serving.look()
    assert pid(serving) == first

    publish(plan, 1)
    assert serving.look()
    assert models(config) == ["tiny@v0002", "tiny"]
    assert not psutil.pid_exists(first)

    publication.rollback(config.root, "tiny")
    assert serving.look()
    assert models(config) == ["tiny@v0003", "tiny"]
    assert served(serving).publication.restores == 1

    serving.close()
    assert serving.served is None
    assert storage.exists(f"{served_uri(plan)}/content"), "a local store is served in place and stays"


def served_uri(plan: Plan) -> str:
    newest = publication.champion(plan.config.root, "tiny")
    assert newest is not None
    return newest.hf_uri


def test_a_version_that_does_not_start_leaves_the_one_before_and_is_not_tried_again(
    plan: Plan, config: ServeConfig, serving: Serving, caplog: pytest.LogCaptureFixture
):
    publish(plan, 1)
    serving.look()
    publish(plan, 2)
    with caplog.at_level(logging.WARNING):
        assert not serving.look()
    assert "version 2 of tiny cannot be served, tiny@v0001 stays until the pointer moves" in caplog.text
    assert "tensor model.norm.weight has another shape" in caplog.text
    assert models(config) == ["tiny@v0001", "tiny"]
    back = pid(serving)
    assert not serving.look()
    assert pid(serving) == back, "nothing is stopped for a version that was refused"

    publish(plan, 3)
    assert serving.look()
    assert models(config) == ["tiny@v0003", "tiny"]


def test_a_version_whose_files_are_damaged_is_refused_before_anything_stops(
    plan: Plan, config: ServeConfig, serving: Serving, caplog: pytest.LogCaptureFixture
):
    publish(plan, 0)
    serving.look()
    first = pid(serving)
    publish(plan, 1)
    storage.write_atomic(f"{served_uri(plan)}/content", b"other bytes")
    assert not serving.look()
    assert pid(serving) == first
    assert "does not have the SHA-256 its manifest promises" in caplog.text


def test_a_server_that_dies_or_stops_answering_is_started_again(
    plan: Plan, config: ServeConfig, serving: Serving, caplog: pytest.LogCaptureFixture
):
    publish(plan, 0)
    serving.look()
    first = pid(serving)
    os.kill(first, signal.SIGKILL)
    psutil.Process(first).wait(timeout=60)
    assert not serving.look()
    assert "the server has died" in caplog.text
    second = pid(serving)
    assert models(config) == ["tiny@v0001", "tiny"]

    urllib.request.urlopen(f"http://127.0.0.1:{config.port}/fall-ill", timeout=5).close()
    assert not serving.look()
    assert "the server has not answered for" in caplog.text
    assert len({first, second, pid(serving)}) == 3
    assert not psutil.pid_exists(second)


def test_the_first_version_must_start(plan: Plan, config: ServeConfig, serving: Serving):
    publish(plan, 2)
    with pytest.raises(ServerError, match="it exited with status 1: tensor model"):
        serving.look()
    assert serving.pid is None


def test_a_port_that_is_taken_is_named(plan: Plan, config: ServeConfig, serving: Serving):
    publish(plan, 0)
    with socket.socket() as other:
        other.bind((config.host, config.port))
        other.listen()
        with pytest.raises(ServerError, match=rf"port is {config.port}, .* use another"):
            serving.look()


def test_a_name_that_is_not_published_yet_is_waited_for_and_said_once(
    plan: Plan, config: ServeConfig, serving: Serving, caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        assert not serving.look()
    assert caplog.text.count("waiting for a publication") == 1
    publish(plan, 0)
    assert serving.look()


def test_a_server_does_not_outlive_an_owner_that_is_killed(plan: Plan, config: ServeConfig, tmp_path: Path):
    publish(plan, 0)
    program = (
        "import logging, pathlib, sys, time\n"
        "from forge_core.serving import Serving\n"
        "from forge_core.serve_config import ServeConfig\n"
        "from tests.forge_core.test_serving import stand_in\n"
        f"config = ServeConfig.model_validate_json({config.model_dump_json()!r})\n"
        f"serving = Serving(config, pathlib.Path({str(tmp_path)!r}), logging.getLogger(), command=stand_in)\n"
        "serving.look()\n"
        "print(serving.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    server.wait(timeout=60)
    owner.wait()
    owner.stdout.close()


def test_engine_arguments_are_spelled_as_options():
    arguments = {"max_model_len": 64, "enforce_eager": True, "enable_chunked_prefill": False, "revision": None}
    assert command_line(arguments | {"served_model_name": ["a", "b"], "hf_overrides": {"x": 1}}) == [
        *("--max-model-len", "64", "--enforce-eager", "--no-enable-chunked-prefill"),
        *("--served-model-name", "a", "b", "--hf-overrides", '{"x": 1}'),
    ]
