"""Tracking never decides the fate of a run."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import mlflow
import pytest

from deployments.local_service import Service, free_port
from forge_core import artifacts, publication, storage
from forge_core.artifacts import Manifest, Ref, resolve, sha256_json
from forge_core.lineage import Lineage, as_tree, find, upstream
from forge_core.plan import Plan
from tasks.tracking import tracking
from tests.pipeline import tiny_config
from tests.stored_runs import store_run


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

    # The same policy from another store is another version: the files of the first may be deleted with their run.
    place = tmp_path / "elsewhere"
    place.mkdir()
    elsewhere = Plan(tiny_config(str(place)), "run")
    again = publication.publish(str(place), "local", _commit(place, elsewhere).ref, run_id="run", metrics={})
    assert again.policy.digest == published.policy.digest
    with tracking(elsewhere, None, logging.getLogger("run")) as tracker:
        tracker.register(again)
    version = client.get_model_version_by_alias("local", "challenger")
    assert len(client.search_model_versions("name = 'local'")) == 2
    assert storage.local_path(str(version.source)) == storage.local_path(again.hf_uri)


@pytest.mark.slow
def test_a_registered_model_and_every_metric_lead_to_what_made_them(mlflow_server: Service, tmp_path: Path):
    config = tiny_config(str(tmp_path), name="lineage")
    plan = store_run(config, "run")
    rollouts, scored, policy = (
        resolve(find(f"{plan.run_uri}/{name}")) for name in ("rollouts/v0002", "scored/v0002", "policies/v0004")
    )
    published = publication.publish(config.root, "lineage", policy.ref, run_id="run", metrics={})
    for _ in range(2):  # the second time as after a resume
        with tracking(plan, None, logging.getLogger("run")) as tracker:
            tracker.record(rollouts.ref, 1)
            tracker.record(scored.ref, 1)
            tracker.register(published)
    client = mlflow.MlflowClient()
    lineage = upstream(policy.ref)
    version = client.get_model_version_by_alias("lineage", "challenger")
    assert version.tags == {
        "forge.digest": policy.digest,
        "forge.uri": policy.uri,
        "forge.run_id": "run",
        "forge.base_policy_digest": find(f"{plan.run_uri}/policies/v0000").digest,
        "forge.dataset_digests": rollouts.inputs["dataset"].digest,
        "forge.num_rollout_sets": "3",
        "forge.num_broken_links": "0",
        "forge.config_digest": sha256_json(config.model_dump(mode="json")),
    }
    parent = client.get_run(str(version.run_id))
    assert Path(client.download_artifacts(parent.info.run_id, "lineage.txt")).read_text() == as_tree(lineage)
    stored = Path(client.download_artifacts(parent.info.run_id, "lineage.json")).read_text()
    assert Lineage.model_validate_json(stored) == lineage
    assert _inputs(parent) == [("dataset", rollouts.inputs["dataset"])]

    stages = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    by_stage = {stage.data.tags["forge.stage"]: stage for stage in stages}
    tags = by_stage["score"].data.tags
    assert tags["forge.output"] == f"{scored.uri} {scored.digest}"
    assert json.loads(tags["forge.inputs"]) == {"rollouts": f"{rollouts.uri} {rollouts.digest}"}
    assert _inputs(by_stage["score"]) == [("rollouts", rollouts.ref)]
    assert _inputs(by_stage["rollout"]) == [("dataset", rollouts.inputs["dataset"])]
    path = client.download_artifacts(by_stage["score"].info.run_id, "manifests/step0001-scored-v0002.json")
    assert Manifest.model_validate_json(Path(path).read_text()) == scored


def _inputs(run: mlflow.entities.Run) -> list[tuple[str, Ref]]:
    """Context of each dataset of a run, and the artifact it refers to."""
    found = []
    for entry in run.inputs.dataset_inputs:
        tags = {tag.key: tag.value for tag in entry.tags}
        uri = mlflow.data.get_source(entry).uri
        kind, digest = tags["mlflow.data.context"], tags["forge.digest"]
        assert digest.startswith(entry.dataset.digest)
        found.append((kind, Ref.model_validate({"kind": kind, "uri": uri, "digest": digest})))
    return found


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
