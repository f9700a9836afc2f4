"""Tracking never decides the fate of a run."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import mlflow
import pytest

from deployments.local_service import Service, free_port
from forge_core import artifacts, publication, storage
from forge_core.artifacts import Manifest
from forge_core.plan import Plan
from tasks.tracking import flatten, tracking
from tests.pipeline import tiny_config


def test_nested_settings_become_dotted_names():
    assert flatten({"a": {"b": 1, "c": [True, None]}, "d": {}}) == {"a.b": "1", "a.c.0": "True", "a.c.1": "", "d": "{}"}


@pytest.mark.slow
def test_a_policy_in_a_local_store_is_registered_once(mlflow_server: Service, tmp_path: Path):
    config = tiny_config(str(tmp_path))
    plan = Plan(config, "run")
    published = publication.publish(config.root, "local", _commit(tmp_path, plan).ref, run_id="run", metrics={})
    for _ in range(2):
        with tracking(plan, None, logging.getLogger("run")) as tracker:
            tracker.register(published)
    client = mlflow.MlflowClient()
    version = client.get_model_version_by_alias("local", "challenger")
    assert len(client.search_model_versions("name = 'local'")) == 1
    assert storage.local_path(str(version.source)) == storage.local_path(published.hf_uri)


def _commit(tmp_path: Path, plan: Plan) -> Manifest:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("x")
    return artifacts.commit(
        tmp_path / "source",
        f"{plan.run_uri}/x",
        kind="policy",
        job={"stage": "score"},
        job_digest="d",
        inputs={},
        summary={"reward/mean": 0.5},
        software={},
        timings={},
    )


def test_a_tracking_server_that_is_down_costs_warnings_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    plan = Plan(tiny_config(str(tmp_path)), "run")
    manifest = _commit(tmp_path, plan)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), tracking(plan, None, logging.getLogger("run")) as tracker:
        assert tracker.record(manifest.ref, 0) == manifest
    assert time.monotonic() - started < 100
    assert "MLflow does not answer" in caplog.text
    assert "the manifests hold every number" in caplog.text
