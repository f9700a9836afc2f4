"""A published name: one of many wins, nothing is lost, and what was there comes back."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge_core import publication, storage
from forge_core.artifacts import ArtifactError, Ref
from forge_core.gc import find_garbage
from forge_core.manifests import find
from forge_core.publication import ChampionChangedError, Publication, champion, previous, publish, rollback
from forge_core.retention import prune
from tests.prunable_runs import KEEP_ONE, is_stored, policy, store_run


@pytest.fixture
def memory() -> str:
    """An empty prefix in memory, where what is tested is the same in every store."""
    return f"memory://{uuid.uuid4().hex}"


def pointer(root: str) -> Publication:
    return Publication.model_validate_json(storage.read_bytes(f"{root}/published/name/current.json"))


def publish_versions(root: str, *numbers: int) -> list[Ref]:
    """Publish these policy versions of one run, each by a run of its own."""
    plan = store_run(root)
    refs = [policy(plan, number).ref for number in numbers]
    for number, ref in zip(numbers, refs, strict=True):
        publish(root, "name", ref, run_id=f"run-{number}", metrics={})
    return refs


def test_a_rollback_puts_the_previous_version_back_and_the_next_one_goes_further(root: str):
    first, second, third = publish_versions(root, 1, 2, 3)
    assert pointer(root).policy == third

    restored = rollback(root, "name")
    assert (restored.version, restored.restores, restored.policy) == (4, 2, second)
    assert pointer(root) == restored == champion(root, "name")
    assert find(f"{root}/published/name") == second

    assert rollback(root, "name").policy == first
    with pytest.raises(ArtifactError, match="nothing was published before name v0005"):
        rollback(root, "name")
    undone = rollback(root, "name", to=3)
    assert (undone.version, undone.restores, undone.policy, undone.run_id) == (6, 3, third, "run-3")
    before = previous(root, "name")
    assert before is not None
    assert before.policy == second
    assert not [found for found in find_garbage(root) if "/published/" in found.uri]


def test_a_run_that_is_repeated_does_not_undo_a_rollback(memory: str):
    first, second = publish_versions(memory, 1, 2)
    rollback(memory, "name")
    assert publish(memory, "name", second, run_id="run-2", metrics={}).version == 2
    assert pointer(memory).policy == first
    assert publish(memory, "name", second, run_id="another", metrics={}).version == 4
    assert pointer(memory).policy == second


def test_a_policy_that_was_compared_with_another_champion_is_not_published(memory: str):
    first, second = publish_versions(memory, 1, 2)
    with pytest.raises(ChampionChangedError, match="name is at version 2 by now, it was at 1"):
        publish(memory, "name", first, run_id="late", metrics={}, replaces=1)
    assert pointer(memory).policy == second
    assert publish(memory, "name", first, run_id="late", metrics={}, replaces=2).version == 3


def test_of_many_publications_at_once_none_is_lost_and_the_pointer_is_the_last(root: str):
    plan = store_run(root)
    ref = policy(plan, 3).ref
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda number: publish(root, "name", ref, run_id=f"run-{number}", metrics={}), range(4)))
    assert sorted(one.version for one in made) == list(range(1, 5))
    assert sorted(publication.history(root, "name"), key=lambda one: one.run_id) == made
    assert [one.previous for one in publication.history(root, "name")] == [None, *range(1, 4)]
    assert pointer(root).version == 4


def test_of_many_promotions_against_one_champion_one_wins(root: str):
    plan = store_run(root)
    ref = policy(plan, 3).ref
    publish(root, "name", ref, run_id="first", metrics={})

    def promote(number: int) -> int | None:
        try:
            return publish(root, "name", ref, run_id=f"run-{number}", metrics={}, replaces=1).version
        except ChampionChangedError:
            return None

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(promote, range(4)))
    assert sorted(version or 0 for version in made) == [0] * 3 + [2]
    assert pointer(root).version == 2


def test_a_pointer_that_a_dead_writer_left_behind_is_put_right(memory: str):
    publish_versions(memory, 1, 2)
    storage.write_atomic(
        f"{memory}/published/name/current.json", storage.read_bytes(f"{memory}/published/name/v0001.json")
    )
    newest = champion(memory, "name")
    assert newest is not None
    assert newest.version == 2
    publish(memory, "name", newest.policy, run_id="run-2", metrics={})  # the same run again
    assert pointer(memory) == newest


def test_retention_leaves_the_champion_and_what_a_rollback_needs(memory: str):
    plan = store_run(memory)  # policies 0 to 7; with this setting 2, 3 and 5 would go
    for number in (2, 3, 5):
        publish(memory, "name", policy(plan, number).ref, run_id=f"run-{number}", metrics={})
    report = prune(plan.run_uri, KEEP_ONE)
    assert [name for name in report.deleted if name.startswith("policies/")] == ["policies/v0002"]
    assert report.kept["policies/v0003"] == "a rollback of name needs it"
    assert report.kept["policies/v0005"] == "published as name"
    assert is_stored(rollback(memory, "name").policy)
    with pytest.raises(ArtifactError, match=r"retention pruned the files of .*v0002"):
        rollback(memory, "name")


def test_a_name_cannot_lead_out_of_its_place(tmp_path: Path):
    with pytest.raises(ValueError, match=r"name is '\.\./run'"):
        champion(str(tmp_path), "../run")
