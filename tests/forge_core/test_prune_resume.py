"""What is pruned can be made again from what is kept, and a run goes on without it."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest

from forge_core import artifacts, listing
from forge_core.artifacts import Ref
from forge_core.jobs import UpdateJob
from forge_core.retention import prune
from forge_core.stages.workspace import committed
from tests.prunable_runs import KEEP_ONE, is_stored, policy, store_run


@pytest.fixture
def memory() -> str:
    """An empty prefix in memory, where what is tested is the same in every store."""
    return f"memory://{uuid.uuid4().hex}"


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
            scored = artifacts.resolve(job.scored[0])
            assert is_stored(job.scored[0])
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
