"""What becomes of every number on its way to a real MLflow server: odd names, odd values, repeats, outages."""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run as MlflowRun

from deployments.local_service import Service, free_port
from forge_core import artifacts
from forge_core.artifacts import Manifest
from forge_core.plan import Plan
from forge_core.software import git_revision
from tasks.run_tags import run_tags
from tasks.tracking import metric_name, tracking
from tests.pipeline import tiny_config

LOGGER = logging.getLogger("run")
HISTORY = [
    {"step": 0, "validation/loss": 2.5},
    {"step": 1, "loss/policy": 2.0, "learning_rate": 1e-3, "grad_norm/total": 0.5},
    {"step": 2, "loss/policy": 1.5, "learning_rate": 5e-4, "grad_norm/total": 0.25, "validation/loss": 1.75},
]


def new_plan(tmp_path: Path, name: str) -> Plan:
    return Plan(tiny_config(str(tmp_path), name=name), "run")


def commit(plan: Plan, tmp_path: Path, stage: str = "score", history: list[dict] | None = None) -> Manifest:
    """An artifact of a stage; its manifest has one number, and its files the history of a training."""
    directory = tmp_path / f"files-{stage}"
    directory.mkdir()
    (directory / "history.jsonl" if history else directory / "x").write_text("\n".join(map(json.dumps, history or [1])))
    return artifacts.commit(
        directory, f"{plan.run_uri}/{stage}", kind="policy", job={"stage": stage}, job_digest="d", inputs={},
        summary={"reward/mean": 0.5}, software={}, timings={},
    )  # fmt: skip


def tracked(plan: Plan) -> MlflowRun:
    """The one run that MLflow has of a plan."""
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(f"forge/{plan.config.name}")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id], f"tags.`forge.run_uri` = '{plan.run_uri}'")
    return run


def points(run: MlflowRun, metric: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, with repeats, in the order of steps."""
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.value) for point in history)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("val/acc@8 (x)", "val/acc_8 _x_"),
        ("reward/my_rewards:shorter/mean", "reward/my_rewards:shorter/mean"),
        ("längé/100%", "l_ng_/100_"),
    ],
)
def test_a_name_that_mlflow_refuses_is_replaced_always_by_the_same_one(name: str, taken: str):
    assert metric_name(name) == taken
    assert metric_name(taken) == taken


@pytest.mark.slow
def test_odd_names_and_odd_values_arrive_and_leave_later_steps_intact(mlflow_server: Service, tmp_path: Path, caplog):
    plan = new_plan(tmp_path, "odd")
    manifest = commit(plan, tmp_path)
    with tracking(plan, None, LOGGER) as tracker:
        tracker.record_numbers({"val/acc@8 (x)": 0.25, "a/b": 1, "a/b/c": 2, "loss": math.nan}, 0, manifest)
        tracker.record_numbers({"loss": math.inf, "a/b": 3}, 1, manifest)
        tracker.record_numbers({"loss": 0.5, "a/b/c": 4}, 2, manifest)
    run = tracked(plan)
    assert points(run, "val/acc_8 _x_") == [(0, 0.25)]
    assert points(run, "a/b") == [(0, 1), (1, 3)]
    assert points(run, "a/b/c") == [(0, 2), (2, 4)]
    (first, nan), (second, large), last = points(run, "loss")
    assert (first, second, last) == (0, 1, (2, 0.5))
    assert math.isnan(nan)
    assert large > 1e308  # SQL has no infinity; MLflow writes the largest number
    assert "refused" not in caplog.text


@pytest.mark.slow
def test_the_curves_of_a_training_have_a_point_a_step_however_often_its_run_resumes(
    mlflow_server: Service, tmp_path: Path
):
    plan = new_plan(tmp_path, "curves")
    policy = commit(plan, tmp_path, "sft", HISTORY)
    for _ in range(3):  # a run and two that go on with it
        with tracking(plan, None, LOGGER) as tracker:
            tracker.record(policy.ref, step=0)
    run = tracked(plan)
    assert points(run, "sft/step/loss/policy") == [(1, 2.0), (2, 1.5)]
    assert points(run, "sft/step/learning_rate") == [(1, 1e-3), (2, 5e-4)]
    assert points(run, "sft/step/validation/loss") == [(0, 2.5), (2, 1.75)]
    assert points(run, "reward/mean") == [(0, 0.5)]


@pytest.fixture
def late_server(mlflow_server: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An address where MLflow answers only once the event is set."""
    port, opened = free_port(), threading.Event()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    target = ("127.0.0.1", int(mlflow_server.url.rpartition(":")[2]))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def forward() -> None:
        opened.wait()
        with socket.create_server(("127.0.0.1", port)) as listener:
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(target)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=forward, daemon=True).start()
    yield opened
    opened.set()


@pytest.mark.slow
def test_numbers_that_were_logged_while_the_server_was_away_are_there_when_it_is_back(
    late_server: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plan = new_plan(tmp_path, "late")
    manifest = commit(plan, tmp_path)
    with caplog.at_level(logging.WARNING), tracking(plan, None, LOGGER) as tracker:
        for step in range(3):
            tracker.record(manifest.ref, step)
        while "MLflow does not answer, 4 entries wait" not in caplog.text:  # the test's own time limit ends this
            threading.Event().wait(0.1)
        late_server.set()
        tracker.record(manifest.ref, 3)
    assert points(tracked(plan), "reward/mean") == [(step, 0.5) for step in range(4)]
    assert "lacks" not in caplog.text


@pytest.mark.slow
def test_a_run_says_which_commit_and_machine_and_keeps_the_newest_attempts_tags(
    mlflow_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true")
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    plan = new_plan(tmp_path, "tags")
    for attempt in ("first", "second"):
        with tracking(plan, run_tags() | {"prefect.flow_run_id": attempt}, LOGGER):
            pass
    tags = tracked(plan).data.tags
    revision = git_revision()
    assert revision is None or tags["mlflow.source.git.commit"] == revision[0]
    assert tags["prefect.flow_run_id"] == "second"
    assert tags["forge.run_id"] == "run"
