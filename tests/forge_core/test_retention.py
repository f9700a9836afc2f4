"""Retention: what is pruned, what never is, and that runs go on from what is left."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forge_core import artifacts, listing, storage
from forge_core.artifacts import ArtifactError
from forge_core.holds import hold
from forge_core.operation import RetentionConfig
from forge_core.publication import publish
from forge_core.retention import prune
from tests.prunable_runs import KEEP_ONE, is_stored, policy, store_run, stored_policies


@pytest.fixture
def memory() -> str:
    """An empty prefix in memory, where what is tested is the same in every store."""
    return f"memory://{uuid.uuid4().hex}"


def test_a_prune_deletes_files_and_keeps_every_manifest(root: str):
    plan = store_run(root)  # policies 0 to 7, train states 2, 4, 6
    others = [found for found in listing.list_objects(plan.run_uri) if not found.path.startswith(("pol", "train"))]
    size = sum(file.num_bytes for file in policy(plan, 2).files)
    state = artifacts.read_manifest(f"{plan.run_uri}/train_states/v0002")
    assert state is not None

    report = prune(plan.run_uri, KEEP_ONE)

    assert stored_policies(plan) == [0, 1, 4, 6, 7]
    assert not is_stored(state.ref)
    # 64 hexadecimal digits and " of policy", three times; " of train_state" once.
    assert size == 74
    assert report.deleted == {
        "policies/v0002": 74,
        "policies/v0003": 74,
        "policies/v0005": 74,
        "train_states/v0002": 79,
    }
    assert report.num_bytes == 301
    assert report.kept == {
        "policies/v0000": "start policy",
        "policies/v0001": "the optimizer started from it",
        "policies/v0004": "belongs to train_states/v0004",
        "policies/v0006": "belongs to train_states/v0006",
        "policies/v0007": "one of the newest 1",
        "train_states/v0004": "one of the newest 2 train states",
        "train_states/v0006": "one of the newest 2 train states",
    }
    left = [found.path for found in listing.list_objects(f"{plan.run_uri}/policies/v0003")]
    assert left == ["manifest.json", "pruned.json"]
    assert [
        found for found in listing.list_objects(plan.run_uri) if not found.path.startswith(("pol", "train"))
    ] == others


def test_a_pruned_artifact_resolves_and_says_why_it_cannot_be_fetched(root: str, tmp_path: Path):
    plan = store_run(root)
    pruned = policy(plan, 3)
    prune(plan.run_uri, KEEP_ONE)
    assert artifacts.resolve(pruned.ref) == pruned
    with pytest.raises(ArtifactError, match=r"pruned the files of .*policies/v0003.*replaying.*retention\.keep_last"):
        artifacts.fetch(pruned.ref, tmp_path)


def test_a_reader_without_a_hold_learns_that_the_files_were_pruned_meanwhile(root: str, tmp_path: Path):
    pruned = policy(store_run(root, num_iterations=1), 2)
    listing.delete_below(pruned.files_uri)
    with pytest.raises(ArtifactError, match=r"missing|lacks a file"):
        artifacts.fetch(pruned.ref, tmp_path)
    storage.create_exclusive(f"{pruned.uri}/pruned.json", b"{}")
    with pytest.raises(ArtifactError, match="retention pruned the files"):
        artifacts.fetch(pruned.ref, tmp_path)


def test_a_second_prune_has_nothing_to_do(memory: str):
    plan = store_run(memory)
    first = prune(plan.run_uri, KEEP_ONE)
    before = listing.list_objects(plan.run_uri)
    second = prune(plan.run_uri, KEEP_ONE)
    assert second.deleted == {}
    assert second.left == {}
    assert second.kept == first.kept
    assert listing.list_objects(plan.run_uri) == before


def test_a_run_that_is_not_there_is_nothing_to_do(root: str):
    assert prune(f"{root}/never", KEEP_ONE).deleted == {}


def test_the_best_version_is_kept_with_the_newest_two(memory: str):
    plan = store_run(memory, accuracy={2: 0.2, 3: 0.9, 5: 0.5, 7: 0.6})
    prune(plan.run_uri, RetentionConfig(keep_last=2, best_metric="eval/heldout/accuracy"))
    assert stored_policies(plan) == [0, 1, 3, 4, 6, 7]  # 4 and 6 belong to train states


def test_a_metric_that_no_evaluation_has_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    plan = store_run(str(tmp_path), accuracy={2: 0.2})
    prune(plan.run_uri, RetentionConfig(keep_last=1, best_metric="eval/heldout/accurcay"))
    assert "eval/heldout/accurcay; evaluations" in caplog.text
    assert "['eval/heldout/accuracy']" in caplog.text


def test_a_published_policy_is_kept_whichever_run_published_it(memory: str):
    plan = store_run(memory)
    publish(memory, "elsewhere", policy(plan, 3).ref, run_id="another-run", metrics={})
    report = prune(plan.run_uri, KEEP_ONE)
    assert report.kept["policies/v0003"] == "published as elsewhere"
    assert is_stored(policy(plan, 3).ref)


def test_an_unreadable_pointer_stops_the_prune_before_it_deletes(memory: str):
    plan = store_run(memory)
    storage.write_atomic(f"{memory}/published/name/current.json", b"{}")
    with pytest.raises(ArtifactError, match=r"published/name/current\.json .* publish name again"):
        prune(plan.run_uri, KEEP_ONE)
    assert stored_policies(plan) == list(range(8))


def test_a_held_policy_is_kept_until_the_hold_ends(memory: str):
    plan = store_run(memory)
    with hold(memory, policy(plan, 3).ref, "evaluation"):
        assert prune(plan.run_uri, KEEP_ONE).kept["policies/v0003"] == "held"
        assert is_stored(policy(plan, 3).ref)
    assert list(prune(plan.run_uri, KEEP_ONE).deleted) == ["policies/v0003"]


def test_a_damaged_train_state_does_not_count_among_the_newest(root: str):
    plan = store_run(root)
    damaged = artifacts.read_manifest(f"{plan.run_uri}/train_states/v0006")
    assert damaged is not None
    listing.delete_below(damaged.files_uri)
    prune(plan.run_uri, KEEP_ONE)
    assert stored_policies(plan) == [0, 1, 2, 4, 7]


def test_an_artifact_with_an_unreadable_manifest_is_left_alone(memory: str):
    plan = store_run(memory)
    manifest = policy(plan, 3)
    storage.write_atomic(f"{manifest.uri}/manifest.json", b"{}")
    report = prune(plan.run_uri, KEEP_ONE)
    assert "cannot be read" in report.kept["policies/v0003"]
    assert listing.list_objects(manifest.files_uri)


def test_the_marker_says_when_and_by_which_rule(memory: str):
    plan = store_run(memory)
    prune(plan.run_uri, KEEP_ONE)
    marker = json.loads(storage.read_bytes(f"{plan.run_uri}/policies/v0003/pruned.json"))
    assert datetime.fromisoformat(marker["pruned_at"]) <= datetime.now(UTC)
    assert marker["rule"] == 'retention: {"keep_last":1,"keep_every":0,"best_metric":null}'
