"""Promotion as flows do it: gates against the champion, and what people see when one fails."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import FlowPauseTimeout

from deployments.local_service import Service
from flows.publish import publish
from forge_core import artifacts, publication
from forge_core.artifacts import Ref
from forge_core.config import PostTrainConfig
from forge_core.gates import GatesConfig
from forge_core.manifests import find
from forge_core.operation import NotifyConfig
from forge_core.plan import Plan
from tasks import registry
from tasks.run import Run
from tasks.tracking import tracking
from tests.pipeline import tiny_config
from tests.stored_runs import commit, store_run
from tests.webhook import Webhook

pytestmark = pytest.mark.slow

GATES = GatesConfig(max_accuracy_drop=0.05, max_truncated_fraction=0.5)
NUM_PROBLEMS = 100


def evaluated(config: PostTrainConfig, run_id: str, num_right: int) -> tuple[Plan, Ref]:
    """The newest policy of a stored run, with an evaluation in which the first problems are right."""
    plan = store_run(config, run_id)
    policy = find(plan.run_uri)
    store_evaluation(plan, policy, num_right)
    return plan, policy


def store_evaluation(plan: Plan, policy: Ref, num_right: int, *, is_champion: bool = False) -> None:
    [evaluation] = plan.config.evals
    problems = artifacts.read_manifest(plan.dataset(evaluation.dataset).output)
    with tempfile.TemporaryDirectory() as name:
        if problems is None:
            (Path(name) / "examples.jsonl").write_text("")
            problems = commit(plan.dataset(evaluation.dataset), Path(name))
        rows = [json.dumps({"id": f"{number}", "is_right": number < num_right}) for number in range(NUM_PROBLEMS)]
        (Path(name) / "samples.jsonl").write_text("\n".join(rows))
        commit(plan.evaluate(policy, problems.ref, evaluation, is_champion=is_champion), Path(name))


def run_publish(plan: Plan, policy: Ref) -> publication.Publication | None:
    """Publication inside a flow; the evaluations it asks for are committed, so no engine is needed."""
    logger = logging.getLogger("publish")

    @flow(name="publish-only", persist_result=False)
    def publish_only() -> publication.Publication | None:
        with tracking(plan, None, logger) as tracker:
            return publish(Run(plan, tracker, logger), policy, {"eval/heldout/truncated_fraction": 0.1})

    return publish_only()


def newest_page() -> str:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["published-policy"])),
            sort=ArtifactSort.CREATED_DESC,
            limit=1,
        )
    return str(found[0].data)


def test_a_worse_policy_leaves_the_champion_and_everybody_is_told_and_a_rollback_moves_the_aliases(
    prefect_server: Service,
    mlflow_server: Service,
    webhook: Webhook,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("GATED_WEBHOOK", webhook.url)
    config = tiny_config(str(tmp_path), name="gated", gates=GATES, notify=NotifyConfig(url_env="GATED_WEBHOOK"))
    root = config.root
    good, good_policy = evaluated(config, "good", num_right=60)
    first = run_publish(good, good_policy)
    assert first is not None
    assert [result.reason for result in first.gates] == [
        "heldout: no champion yet",
        "eval/heldout/truncated_fraction is 0.1, not above 0.5",
    ]

    # 20 of 100 problems are lost, none is won: the interval lies around -0.2, far below -0.05.
    worse, worse_policy = evaluated(config.model_copy(update={"seed": 1}), "worse", num_right=40)
    store_evaluation(worse, good_policy, 60, is_champion=True)
    with caplog.at_level(logging.ERROR):
        assert run_publish(worse, worse_policy) is None
    assert publication.champion(root, "gated") == first
    reason = "accuracy 0.400 against the champion's 0.600 on the same 100 problems, difference -0.200"
    assert f"gated keeps its champion: heldout: {reason}" in caplog.text
    assert "not published, 1 gates failed" in newest_page()
    assert reason in newest_page()
    client = mlflow.MlflowClient()
    challenger = client.get_model_version_by_alias("gated", "challenger")
    assert challenger.tags["forge.uri"] == worse_policy.uri
    assert challenger.tags["forge.gates"] == "failed: max_accuracy_drop/heldout"
    assert reason in client.get_run(str(challenger.run_id)).data.tags["forge.gate.max_accuracy_drop/heldout"]
    assert client.get_model_version_by_alias("gated", "champion").tags["forge.uri"] == good_policy.uri
    with pytest.raises(MlflowException):
        client.get_model_version_by_alias("gated", "previous")

    better, better_policy = evaluated(config.model_copy(update={"seed": 2}), "better", num_right=80)
    store_evaluation(better, good_policy, 60, is_champion=True)
    second = run_publish(better, better_policy)
    assert second is not None
    assert (second.version, second.previous) == (2, 1)
    assert client.get_model_version_by_alias("gated", "champion").tags["forge.uri"] == better_policy.uri
    assert client.get_model_version_by_alias("gated", "previous").tags["forge.uri"] == good_policy.uri

    publication.rollback(root, "gated")
    registry.follow_history(client, root, "gated")
    assert client.get_model_version_by_alias("gated", "champion").tags["forge.uri"] == good_policy.uri
    again = run_publish(better, better_policy)  # a retry of the flow run
    assert again == second
    told = [(one["event"], one["run_id"]) for one in webhook.received if one["name"] == "gated"]
    assert told == [("published", "good"), ("refused", "worse"), ("published", "better")], "and not once more"
    assert reason in webhook.received[1]["text"]
    champion = publication.champion(root, "gated")
    assert champion is not None
    assert champion.policy == good_policy
    assert client.get_model_version_by_alias("gated", "champion").tags["forge.uri"] == good_policy.uri


def resume_when_paused(root: str) -> None:
    """What a person does in the UI: wait for the paused run, see that nothing is published yet, and press Resume."""
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])))
        while not (paused := client.read_flow_runs(flow_run_filter=wanted)):
            assert time.monotonic() < deadline, "no run pauses"
            time.sleep(0.2)
        assert publication.versions(root, "approved") == []
        client.resume_flow_run(paused[0].id)


def test_a_policy_that_needs_approval_is_published_when_a_person_resumes_the_run(
    prefect_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # MLflow's local file
    config = tiny_config(str(tmp_path), name="approved", gates=GatesConfig(wait_for_approval_seconds=60))
    plan, policy = evaluated(config, "run", num_right=60)
    person = threading.Thread(target=resume_when_paused, args=(config.root,))
    person.start()
    published = run_publish(plan, policy)
    person.join()
    assert published is not None
    assert publication.champion(config.root, "approved") == published


def test_a_policy_that_nobody_approves_is_not_published(
    prefect_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(str(tmp_path), name="ignored", gates=GatesConfig(wait_for_approval_seconds=1))
    plan, policy = evaluated(config, "run", num_right=60)
    with pytest.raises(FlowPauseTimeout):
        run_publish(plan, policy)
    assert publication.champion(config.root, "ignored") is None
