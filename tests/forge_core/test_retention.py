"""Retention: what is pruned, what never is, and that runs go on from what is left."""

from __future__ import annotations

import json
import logging
import tempfile
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forge_core import artifacts, listing, storage
from forge_core.artifacts import ArtifactError, Manifest, Ref
from forge_core.config import GrpoConfig, PostTrainConfig, RetentionConfig
from forge_core.holds import hold, keep
from forge_core.jobs import StageJob, UpdateJob
from forge_core.plan import Plan
from forge_core.publication import publish
from forge_core.retention import Pruned, needed_digests, prune
from forge_core.retention_rules import Version, to_prune
from forge_core.stages.workspace import committed

KEEP_ONE = RetentionConfig(keep_last=1)
START, SFT = Version(0, "d0", "start"), Version(1, "d1", "sft")


@pytest.fixture
def memory() -> str:
    """An empty prefix in memory, where what is tested is the same in every store."""
    return f"memory://{uuid.uuid4().hex}"


def updates(first: int, last: int) -> list[Version]:
    return [Version(number, f"d{number}") for number in range(first, last + 1)]


def pruned_numbers(policies: list[Version], retention: RetentionConfig, states: list[Version] = [], **needs) -> str:  # noqa: B006
    """Numbers of the policies, then of the train states, that are pruned."""
    names = to_prune(policies, states, retention, **needs).prune
    numbers = {kind: [name[-2:] for name in names if name.startswith(kind)] for kind in ("policies", "train_states")}
    return f"{' '.join(numbers['policies'])} | {' '.join(numbers['train_states'])}".strip()


# Versions 0 (start), 1 (SFT) and 2 to 9 (updates), unless said otherwise.
@pytest.mark.parametrize(
    ("settings", "needs", "expected"),
    [
        ({}, {}, "|"),
        ({"keep_last": 1}, {}, "02 03 04 05 06 07 08 |"),
        ({"keep_last": 3}, {}, "02 03 04 05 06 |"),
        ({"keep_last": 20}, {}, "|"),
        ({"keep_last": 1, "keep_every": 4}, {}, "02 03 05 06 07 |"),
        (
            {"keep_last": 1, "best_metric": "eval/h/accuracy"},
            {"scores": {2: 0.1, 5: 0.9, 7: 0.8}},
            "02 03 04 06 07 08 |",
        ),
        # The newest of equals is best.
        ({"keep_last": 1, "best_metric": "eval/h/accuracy"}, {"scores": {5: 0.9, 7: 0.9}}, "02 03 04 05 06 08 |"),
        # The best is among the newest already: no older one is kept in its place.
        ({"keep_last": 1, "best_metric": "eval/h/accuracy"}, {"scores": {5: 0.8, 9: 0.9}}, "02 03 04 05 06 07 08 |"),
        ({"keep_last": 1}, {"needed": {"d4": "held", "d6": "published as x", "other": "held"}}, "02 03 05 07 08 |"),
        ({}, {"needed": {"d4": "held"}}, "|"),
    ],
)
def test_policies_that_are_pruned(settings: dict, needs: dict, expected: str):
    assert pruned_numbers([START, SFT, *updates(2, 9)], RetentionConfig(**settings), **needs) == expected


@pytest.mark.parametrize(
    ("states", "needs", "expected"),
    [
        (updates(0, -1), {}, "02 03 04 05 06 07 08 |"),
        # The two newest train states, and the policies they belong to.
        ([Version(number, f"s{number}") for number in (2, 4, 6, 8)], {}, "02 03 04 05 07 | 02 04"),
        # A damaged one does not count, and is not kept either.
        (
            [Version(2, "s2"), Version(4, "s4"), Version(6, "s6", is_readable=False), Version(8, "s8")],
            {},
            "02 03 05 06 07 | 02 06",
        ),
        # A train state that is held keeps its policy.
        ([Version(number, f"s{number}") for number in (2, 4, 6, 8)], {"needed": {"s2": "held"}}, "03 04 05 07 | 04"),
    ],
)
def test_train_states_that_are_pruned(states: list[Version], needs: dict, expected: str):
    assert pruned_numbers([START, SFT, *updates(2, 9)], KEEP_ONE, states, **needs) == expected


def test_with_keep_last_0_no_train_state_is_pruned():
    states = [Version(number, f"s{number}") for number in (2, 4, 6)]
    assert pruned_numbers([START, SFT, *updates(2, 9)], RetentionConfig(), states) == "|"


def test_without_sft_the_start_policy_is_where_the_optimizer_started():
    decision = to_prune([START, *updates(1, 3)], [], KEEP_ONE)
    assert decision.prune == ("policies/v0001", "policies/v0002")
    assert decision.kept == {
        "policies/v0000": "the optimizer started from it",
        "policies/v0003": "one of the newest 1",
    }


def test_a_run_of_updates_alone_keeps_its_newest():
    assert pruned_numbers(updates(5, 7), KEEP_ONE) == "05 06 |"


def test_settings_that_could_never_take_effect_are_refused():
    with pytest.raises(ValueError, match="keep_last is 0, which prunes nothing"):
        RetentionConfig(keep_every=5)
    with pytest.raises(ValueError, match="best_metric"):
        RetentionConfig(keep_last=1, best_metric="accuracy")


def commit(job: StageJob, uri: str, kind: artifacts.Kind, inputs: dict[str, Ref], summary: dict | None = None) -> Ref:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "content").write_text(f"{job.digest()} of {kind}")
        return artifacts.commit(
            Path(name),
            uri,
            kind=kind,
            job=job.as_json(),
            job_digest=job.digest(),
            inputs=inputs,
            summary=summary or {},
            software=job.software,
            timings={},
        ).ref


def store_run(root: str, *, num_iterations: int = 6, accuracy: dict[int, float] | None = None) -> Plan:
    """Start, SFT, then updates that make versions 2, 3, ..., with a train state for each even one and evaluations."""
    config = PostTrainConfig(root=root, grpo=GrpoConfig(num_iterations=num_iterations, checkpoint_every=2))
    plan = Plan(config, "run")
    assert plan.sft_config is not None

    def run(job: StageJob, summary: dict | None = None) -> Ref:
        return commit(job, job.output, job.kind, job.inputs, summary)

    problems = run(plan.dataset(config.grpo.dataset))
    policy = run(plan.sft(run(plan.start()), run(plan.dataset(plan.sft_config.dataset))))
    for iteration in range(num_iterations):
        scored = run(plan.score(run(plan.rollout(policy, problems, iteration)), iteration))
        update = plan.update(policy, scored, iteration)
        policy = run(update)
        if update.snapshot_output:
            commit(update, update.snapshot_output, "train_state", {"policy": policy})
        if (value := (accuracy or {}).get(iteration + 2)) is not None:
            run(plan.evaluate(policy, problems, config.evals[0]), {"eval/heldout/accuracy": value})
    return plan


def policy(plan: Plan, version: int) -> Manifest:
    manifest = artifacts.read_manifest(f"{plan.run_uri}/policies/v{version:04d}")
    assert manifest is not None
    return manifest


def is_stored(ref: Ref) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        try:
            artifacts.fetch(ref, Path(scratch))
        except ArtifactError:
            return False
        return True


def stored_policies(plan: Plan) -> list[int]:
    names = storage.list_names(f"{plan.run_uri}/policies")
    return [number for number in range(len(names)) if is_stored(policy(plan, number).ref)]


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


def test_a_policy_that_is_published_while_it_is_marked_is_kept(memory: str, monkeypatch: pytest.MonkeyPatch):
    plan = store_run(memory)
    ref = policy(plan, 3).ref
    create = storage.create_exclusive

    def publisher_first(uri: str, data: bytes) -> None:
        create(uri, data)
        if uri == f"{ref.uri}/pruned.json":
            publish(memory, "name", ref, run_id="run", metrics={})

    monkeypatch.setattr(storage, "create_exclusive", publisher_first)
    assert prune(plan.run_uri, KEEP_ONE).kept["policies/v0003"] == "published as name"
    assert is_stored(ref)


def test_a_stage_whose_output_was_pruned_is_done(memory: str):
    plan = store_run(memory)
    manifest = policy(plan, 3)
    prune(plan.run_uri, KEEP_ONE)
    assert committed(UpdateJob.model_validate(manifest.job)) == manifest


def walked_back(newest: Ref) -> tuple[Ref, list[UpdateJob], Ref | None]:
    """The walk of `trainer_at`: where a replay starts, the updates it repeats, and the train state it starts with."""
    jobs: list[UpdateJob] = []
    policy = newest
    while (manifest := artifacts.resolve(policy)).job["stage"] == "update":
        job = UpdateJob.model_validate(manifest.job)
        state = artifacts.read_manifest(job.snapshot_output) if job.snapshot_output else None
        if state is not None and is_stored(state.ref):
            return policy, jobs, state.ref
        jobs.append(job)
        policy = job.policy
    return policy, jobs, None


@pytest.mark.parametrize("damaged", [(), ("v0006",), ("v0006", "v0004")])
def test_every_policy_can_be_made_again_from_what_is_kept(memory: str, damaged: tuple[str, ...]):
    plan = store_run(memory)
    prune(plan.run_uri, KEEP_ONE)
    for name in damaged:
        state = artifacts.read_manifest(f"{plan.run_uri}/train_states/{name}")
        assert state is not None
        listing.delete_below(state.files_uri)
    for version in range(2, 8):  # pruned or not
        start, jobs, state = walked_back(policy(plan, version).ref)
        assert is_stored(start)
        assert state is None or is_stored(state)
        for job in jobs:
            scored = artifacts.resolve(job.scored)
            assert is_stored(job.scored)
            assert is_stored(scored.inputs["rollouts"])
    assert is_stored(policy(plan, 7).ref)  # the weights that a resume goes on with


@pytest.mark.slow
def test_the_learner_passes_over_a_pruned_train_state(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from forge_core.stages.learner import _readable_snapshot
    from forge_core.stages.workspace import Workspace

    plan = store_run(str(tmp_path / "store"))
    prune(plan.run_uri, KEEP_ONE)
    oldest, newest = (policy(plan, version) for version in (2, 6))
    with caplog.at_level(logging.INFO):
        workspace = Workspace(tmp_path / "scratch")
        assert _readable_snapshot(oldest.ref, UpdateJob.model_validate(oldest.job), workspace) is None
    assert "train_states/v0002 cannot be used, going further back: retention pruned" in caplog.text
    assert _readable_snapshot(newest.ref, UpdateJob.model_validate(newest.job), workspace) is not None


def test_the_marker_says_when_and_by_which_rule(memory: str):
    plan = store_run(memory)
    prune(plan.run_uri, KEEP_ONE)
    marker = json.loads(storage.read_bytes(f"{plan.run_uri}/policies/v0003/pruned.json"))
    assert datetime.fromisoformat(marker["pruned_at"]) <= datetime.now(UTC)
    assert marker["rule"] == 'retention: {"keep_last":1,"keep_every":0,"best_metric":null}'
