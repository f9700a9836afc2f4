"""The main job as users run it: a deployment on a worker, artifacts in S3, numbers in MLflow, and a second attempt."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from uuid import UUID

import mlflow
import pytest
from mlflow.entities import Run as MlflowRun
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import PrefectHTTPStatusError
from transformers import AutoModelForCausalLM

from deployments.local_service import Service
from deployments.object_stores import SECRET_KEY
from deployments.services import POOL
from forge_core import artifacts, storage
from forge_core.config import PostTrainConfig
from forge_core.plan import Plan
from forge_core.publication import Publication, published_uri
from tests.flows.deployed import finished, start_run
from tests.pipeline import policies, tiny_config
from tests.planted import found_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_ITERATIONS = 2
RUN_ID = "end-to-end"


def run_deployment(config: PostTrainConfig) -> FlowRun:
    """A finished run of post-train/quickstart with this config."""
    return finished(start_run(config, RUN_ID))


def task_states(flow_run_id: UUID) -> Counter[str]:
    """How many task runs of a flow run ended in each state."""
    with get_client(sync_client=True) as client:
        chosen = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run_id]))
        return Counter(str(task_run.state_name) for task_run in client.read_task_runs(task_run_filter=chosen))


def tracked_runs(plan: Plan) -> tuple[MlflowRun, list[MlflowRun]]:
    """The MLflow run of a flow run, and the nested ones of its stages."""
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(f"forge/{plan.config.name}")
    assert experiment is not None
    [parent] = client.search_runs([experiment.experiment_id], f"tags.`forge.run_uri` = '{plan.run_uri}'")
    children = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    return parent, list(children)


def newest_artifact(key: str) -> str:
    """What the newest page under a key in the Prefect UI says."""
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        [found] = client.read_artifacts(artifact_filter=chosen, sort=ArtifactSort.CREATED_DESC, limit=1)
        return str(found.data)


def history(run: MlflowRun, metric: str) -> list[tuple[int, float]]:
    """Steps and values of a metric."""
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.value) for point in points)


def test_a_deployment_run_trains_publishes_and_tracks_and_a_second_one_changes_nothing(
    worker: Service, prefect_server: Service, mlflow_server: Service, seaweed_s3: str, tmp_path: Path
):
    config = tiny_config(f"{seaweed_s3}/flows")
    grpo = config.grpo.model_copy(update={"num_iterations": NUM_ITERATIONS, "evaluate_every": 1})
    few = config.evals[0].model_copy(update={"name": "few", "num_examples": 5})
    config = config.model_copy(update={"grpo": grpo, "evals": (*config.evals, few)})
    plan = Plan(config, RUN_ID)

    first = run_deployment(config)
    assert first.state_name == "Completed", f"see the log of the worker: {worker.log_tail()}"
    made = policies(plan)
    assert [manifest.job["stage"] for manifest in made] == ["start", "sft", "update", "update"]

    pointer = Publication.model_validate_json(
        storage.read_bytes(f"{published_uri(config.root, config.name)}/current.json")
    )
    assert pointer.policy == made[-1].ref
    _, hf_dir = artifacts.fetch(pointer.policy, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(hf_dir).num_parameters() > 0

    parent, children = tracked_runs(plan)
    assert parent.info.status == "FINISHED"
    assert {child.data.tags["forge.stage"] for child in children} == {
        "overlap",
        "sft",
        "rollout",
        "score",
        "update",
        "evaluate",
    }
    assert parent.data.params["grpo.group_size"] == "4"
    tags = ("prefect.flow_run_id", "prefect.deployment", "prefect.work_pool", "forge.run_id")
    assert [parent.data.tags[name] for name in tags] == [str(first.id), "quickstart", POOL, RUN_ID]
    assert [step for step, _ in history(parent, "sft/step/loss/policy")] == list(range(1, config.sft.num_steps + 1))
    rewards = history(parent, "reward/mean")
    assert [step for step, _ in rewards] == list(range(NUM_ITERATIONS))
    for name in ("heldout", "few"):  # before SFT, after it, and after every iteration
        assert [step for step, _ in history(parent, f"eval/{name}/accuracy")] == [-1, 0, *range(1, NUM_ITERATIONS + 1)]
    names = sorted(parent.data.metrics)
    assert not [(a, b) for a in names for b in names if b.startswith(f"{a}/")], "a metric is the path prefix of another"
    stored = {file.path for file in mlflow.MlflowClient().list_artifacts(parent.info.run_id)}
    assert {"config.json", "completions.json", "report.md", "report.png"} <= stored
    assert "| heldout |" in storage.read_bytes(f"{plan.run_uri}/report.md").decode()
    assert "data:image/png;base64," in newest_artifact("report")
    version = mlflow.MlflowClient().get_model_version_by_alias(config.name, "challenger")
    assert version.source == pointer.hf_uri
    assert mlflow.MlflowClient().get_model_version_by_alias(config.name, "champion").version == version.version

    places = [service.log.parent for service in (worker, prefect_server, mlflow_server)]
    assert found_in(plan.run_id, places=places, root=config.root), "this search finds what is there"
    assert found_in(SECRET_KEY, places=places, root=config.root) == []

    objects = sorted(storage.list_names(f"{plan.run_uri}/policies"))
    second = run_deployment(config)
    assert second.state_name == "Completed"
    assert policies(plan) == made
    assert sorted(storage.list_names(f"{plan.run_uri}/policies")) == objects
    states = task_states(second.id)
    assert states == {"Cached": states["Cached"], "Completed": 1}, "only publish runs again"
    again, children_again = tracked_runs(plan)
    assert again.info.run_id == parent.info.run_id
    assert len(children_again) == len(children)
    assert history(again, "reward/mean") == rewards
    assert [step for step, _ in history(again, "eval/few/accuracy")] == [-1, 0, *range(1, NUM_ITERATIONS + 1)]
    version_again = mlflow.MlflowClient().get_model_version_by_alias(config.name, "challenger")
    assert version_again.version == version.version


def test_credentials_in_a_config_are_refused_by_the_server_which_does_not_keep_them(
    worker: Service, prefect_server: Service, seaweed_s3: str
):
    config = tiny_config(f"{seaweed_s3}/planted").model_copy(update={"root": "s3://key:open/sesame@bucket/x"})
    with pytest.raises(PrefectHTTPStatusError, match="a URI with credentials; put them in the environment"):
        start_run(config, RUN_ID)
    assert found_in("open/sesame", places=[prefect_server.log.parent, worker.log.parent], root=seaweed_s3) == []


def test_a_bad_config_fails_before_any_process_starts(worker: Service, seaweed_s3: str):
    config = tiny_config(f"{seaweed_s3}/bad")
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"uri": "/no/such/policy"})})
    run = run_deployment(config)
    assert run.state_name == "Failed"
    assert run.state is not None
    assert "policy.uri" in str(run.state.message)
    assert "/no/such/policy" in str(run.state.message)
    assert storage.list_names(f"{config.root}/{RUN_ID}") == []
    assert json.dumps(sorted(task_states(run.id))) == "[]"
