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
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId
from prefect.client.schemas.objects import FlowRun
from transformers import AutoModelForCausalLM

from deployments.local_service import Service
from forge_core import artifacts, storage
from forge_core.config import PostTrainConfig
from forge_core.plan import Plan
from forge_core.publication import Publication, published_uri
from tests.flows.deployed import finished, start_run
from tests.pipeline import policies, tiny_config

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


def history(run: MlflowRun, metric: str) -> list[tuple[int, float]]:
    """Steps and values of a metric."""
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.value) for point in points)


def test_a_deployment_run_trains_publishes_and_tracks_and_a_second_one_changes_nothing(
    worker: Service, seaweed_s3: str, tmp_path: Path
):
    config = tiny_config(f"{seaweed_s3}/flows")
    config = config.model_copy(update={"grpo": config.grpo.model_copy(update={"num_iterations": NUM_ITERATIONS})})
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
    rewards = history(parent, "reward/mean")
    assert [step for step, _ in rewards] == list(range(NUM_ITERATIONS))
    assert [step for step, _ in history(parent, "eval/heldout/accuracy")] == [-1, 0, NUM_ITERATIONS]
    names = sorted(parent.data.metrics)
    assert not [(a, b) for a in names for b in names if b.startswith(f"{a}/")], "a metric is the path prefix of another"
    stored = {file.path for file in mlflow.MlflowClient().list_artifacts(parent.info.run_id)}
    assert {"config.json", "completions.json"} <= stored
    version = mlflow.MlflowClient().get_model_version_by_alias(config.name, "challenger")
    assert version.source == pointer.hf_uri
    assert mlflow.MlflowClient().get_model_version_by_alias(config.name, "champion").version == version.version

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
    version_again = mlflow.MlflowClient().get_model_version_by_alias(config.name, "challenger")
    assert version_again.version == version.version


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
