"""Prunes that meet readers, publishers, or the remains of a prune that died."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forge_core import artifacts, listing, storage
from forge_core.artifacts import ArtifactError, Manifest
from forge_core.holds import hold, keep
from forge_core.publication import publish
from forge_core.retention import Pruned, needed_digests, prune
from tests.prunable_runs import KEEP_ONE, is_stored, policy, store_run


@pytest.fixture
def memory() -> str:
    """An empty prefix in memory, where what is tested is the same in every store."""
    return f"memory://{uuid.uuid4().hex}"


def mark(manifest: Manifest, seconds_ago: float) -> None:
    """What a prune leaves that died after its mark, before it deleted anything."""
    content = Pruned(pruned_at=datetime.now(UTC) - timedelta(seconds=seconds_ago), rule="by hand")
    storage.write_atomic(f"{manifest.uri}/pruned.json", content.model_dump_json().encode())


def test_a_prune_that_died_before_it_deleted_is_finished_once_it_cannot_be_alive(root: str):
    plan = store_run(root, num_iterations=2)  # policies 0 to 3
    manifest = policy(plan, 2)
    mark(manifest, seconds_ago=100)
    # For all the next one knows, the first one is about to withdraw.
    report = prune(plan.run_uri, KEEP_ONE)
    assert report.left == {"policies/v0002": "another prune may be at it"}
    assert listing.list_objects(manifest.files_uri)
    mark(manifest, seconds_ago=301)
    with hold(root, policy(plan, 1).ref, "of something else"):
        report = prune(plan.run_uri, KEEP_ONE)
    assert report.left == {}
    assert report.deleted == {"policies/v0002": 74}
    assert listing.list_objects(manifest.files_uri) == []


def test_what_a_dead_prune_has_marked_is_left_to_a_reader_that_came_before(memory: str):
    plan = store_run(memory, num_iterations=2)
    manifest = policy(plan, 2)
    with hold(memory, manifest.ref, "reading"):
        mark(manifest, seconds_ago=301)
        assert prune(plan.run_uri, KEEP_ONE).left == {"policies/v0002": "held"}
        assert listing.list_objects(manifest.files_uri)
    assert prune(plan.run_uri, KEEP_ONE).deleted == {"policies/v0002": 74}


def test_a_half_deleted_artifact_is_finished_at_once(memory: str):
    plan = store_run(memory, num_iterations=2)  # policies 0 to 3
    manifest = policy(plan, 2)
    mark(manifest, seconds_ago=0)
    extra = manifest.model_copy(
        update={"files": (*manifest.files, manifest.files[0].model_copy(update={"path": "deleted already"}))}
    )
    storage.write_atomic(f"{manifest.uri}/manifest.json", extra.model_dump_json().encode())
    report = prune(plan.run_uri, KEEP_ONE)
    assert report.deleted == {"policies/v0002": 74}
    assert listing.list_objects(manifest.files_uri) == []


def test_a_reader_that_came_before_the_mark_keeps_its_files(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The reader holds and looks between the decision and the mark: the pruner's second look finds the hold.
    plan = store_run(root)
    ref = policy(plan, 3).ref
    create = storage.create_exclusive

    def reader_first(uri: str, data: bytes) -> None:
        if uri == f"{ref.uri}/pruned.json":
            keep(root, ref, "reading")
        create(uri, data)

    monkeypatch.setattr(storage, "create_exclusive", reader_first)
    report = prune(plan.run_uri, KEEP_ONE)
    assert report.kept["policies/v0003"] == "held"
    assert "policies/v0003" not in report.deleted
    artifacts.fetch(ref, tmp_path)  # and pruned.json has been withdrawn


def test_a_reader_that_comes_after_the_mark_is_refused(memory: str, monkeypatch: pytest.MonkeyPatch):
    # The reader holds and looks after the pruner's second look: too late, and it is told so before it reads.
    plan = store_run(memory)
    ref = policy(plan, 3).ref
    refused = []

    def reader_after(uri_root: str) -> dict[str, str]:
        needed = needed_digests(uri_root)
        if storage.exists(f"{ref.uri}/pruned.json"):
            with pytest.raises(ArtifactError, match="retention pruned"), hold(memory, ref, "reading"):
                pytest.fail("the block must not be entered")
            refused.append(ref)
        return needed

    monkeypatch.setattr("forge_core.retention.needed_digests", reader_after)
    report = prune(plan.run_uri, KEEP_ONE)
    assert refused == [ref]
    assert "policies/v0003" in report.deleted
    assert storage.list_names(f"{memory}/holds/{ref.digest}") == []


def test_a_policy_that_is_marked_cannot_be_published_any_more(memory: str, monkeypatch: pytest.MonkeyPatch):
    plan = store_run(memory)
    ref = policy(plan, 3).ref
    create = storage.create_exclusive

    def publisher_first(uri: str, data: bytes) -> None:
        create(uri, data)
        if uri == f"{ref.uri}/pruned.json":
            with pytest.raises(ArtifactError, match="pruned"):
                publish(memory, "name", ref, run_id="run", metrics={})

    monkeypatch.setattr(storage, "create_exclusive", publisher_first)
    prune(plan.run_uri, KEEP_ONE)
    assert not is_stored(ref)
    assert storage.list_names(f"{memory}/published") == []  # no pointer to what is gone
