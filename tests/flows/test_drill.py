"""The drill as people run it: a deployment on a worker, artifacts in S3, kills and storage faults, equal digests."""

from __future__ import annotations

import mlflow
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from deployments.local_service import Service
from forge_core import storage
from forge_core.drill import DrillConfig, DrillReport
from forge_core.faults import Fault
from forge_core.plan import Plan
from tests.flows.deployed import finished, start_run
from tests.pipeline import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = (
    Fault(job="sft", action="kill"),
    Fault(job="rollout v0001", action="kill", at="before_commit"),
    Fault(job="score v0001", action="kill", at="after_commit"),
    Fault(job="update v0002", action="kill", at="after_commit"),
    Fault(job="update v0003", action="kill_flow"),
    Fault(job="rollout v0003", action="kill_all", at="after_commit"),
    Fault(job="update v0004", action="kill", at="before_commit"),
)
STORAGE_FAULTS = (
    Fault(job="rollout v0001", action="unavailable", at="upload", times=2),
    Fault(job="score v0002", action="reset", at="create"),
    Fault(job="update v0003", action="tear", at="upload"),
    Fault(job="score v0003", action="lose", at="upload"),
    Fault(job="update v0004", action="unavailable", at="download"),
    Fault(job="evaluate", action="slow", at="read"),
)


def test_a_run_that_is_killed_and_whose_store_fails_ends_with_the_digests_of_an_undisturbed_one(
    worker: Service, seaweed_s3: str
):
    poisoned = Fault(job="update v0003", action="not_finite")
    config = DrillConfig(run=tiny_config(f"{seaweed_s3}/drill"), faults=(*KILLS, *STORAGE_FAULTS, poisoned))
    run = finished(start_run(config, "drilled", "drill/default"))
    assert run.state_name == "Completed", worker.log_tail()
    content = storage.read_bytes(f"{Plan(config.run, 'drilled').run_uri}/drill.json")
    report = DrillReport.model_validate_json(content)
    assert report.digests_equal
    assert report.not_struck == ()
    assert report.faults == len(KILLS) + len(STORAGE_FAULTS) + 1
    assert report.restarts == 2  # the flow was killed twice
    # Killed before its commit, a stage is done again; killed after it, never. The NaN costs an attempt as well, and so
    # does an update that was at work when the flow was killed.
    assert report.stages_redone == 5

    with get_client(sync_client=True) as client:
        [artifact] = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["drill"])))
    assert "digests equal" in str(artifact.data)
    experiment = mlflow.get_experiment_by_name("forge/drill")
    assert experiment is not None
    [tracked] = mlflow.MlflowClient().search_runs([experiment.experiment_id], "attributes.run_name = 'drilled'")
    assert tracked.data.metrics["drill/digests_equal"] == 1
    assert tracked.data.metrics["drill/stages_redone"] == report.stages_redone
