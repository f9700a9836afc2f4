"""Runs that start from what another one has stored: replay, re-score, redo an update, branch, reuse."""

from __future__ import annotations

import json

import pytest

from deployments.local_service import Service
from flows.branch import branch
from flows.post_train import post_train
from flows.redo_update import redo_update
from flows.replay import replay
from flows.rescore import rescore
from forge_core import storage
from forge_core.again import BranchConfig, RedoConfig, ReplayConfig, RescoreConfig
from forge_core.artifacts import ArtifactError, Manifest, is_pruned, read_manifest
from forge_core.config import FunctionConfig, PostTrainConfig, RewardConfig
from forge_core.operation import RetentionConfig
from forge_core.plan import Plan
from tests.pipeline import policies, tiny_config, weights_sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def source(
    prefect_server: Service, mlflow_server: Service, tmp_path_factory: pytest.TempPathFactory
) -> PostTrainConfig:
    """The config of a finished run called `source`."""
    config = tiny_config(str(tmp_path_factory.mktemp("store")))
    config = config.model_copy(update={"grpo": config.grpo.model_copy(update={"num_iterations": 2})})
    post_train(config, run_id="source")
    return config


def artifact(config: PostTrainConfig, run_id: str, name: str) -> Manifest:
    found = read_manifest(f"{Plan(config, run_id).run_uri}/{name}")
    assert found is not None
    return found


def test_a_replay_recomputes_every_update_and_finds_the_one_that_was_forged(source: PostTrainConfig):
    run_uri = Plan(source, "source").run_uri
    rows = replay(ReplayConfig(run=run_uri))
    assert [(row["policy"], row["is equal"]) for row in rows] == [("v0002", True), ("v0003", True)]

    manifest = storage.local_path(f"{run_uri}/policies/v0003/manifest.json")
    assert manifest is not None
    honest = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(honest) | {"digest": "0" * 64}))
    try:
        with pytest.raises(ArtifactError, match=r"^v0003 of .* differ"):
            replay(ReplayConfig(run=run_uri))
    finally:
        manifest.write_text(honest)


def test_stored_rollouts_are_scored_with_another_reward_and_nothing_is_sampled(source: PostTrainConfig):
    run_uri = Plan(source, "source").run_uri
    reward = RewardConfig(fn="tests.flows.functions:brevity")
    rows = rescore(RescoreConfig(run=run_uri, root=source.root, rewards=(reward,)), run_id="rescored")
    assert [row["rollouts"] for row in rows] == ["v0001", "v0002"]
    scored = artifact(source, "rescored", "scored/v0001")
    assert scored.inputs["rollouts"] == artifact(source, "source", "rollouts/v0001").ref
    assert rows[0]["reward after"] == scored.summary["reward_by_function/brevity"] != rows[0]["reward before"]
    assert storage.list_names(f"{Plan(source, 'rescored').run_uri}/rollouts") == []


def test_an_update_is_redone_with_another_loss_from_the_same_policy_and_rollouts(source: PostTrainConfig):
    before = artifact(source, "source", "policies/v0003")
    loss = FunctionConfig(fn="tests.flows.functions:reinforce")
    redo_update(RedoConfig(policy=before.uri, root=source.root, loss=loss), run_id="redone")
    after = artifact(source, "redone", "policies/v0003")
    assert after.inputs == before.inputs
    assert weights_sha256([after]) != weights_sha256([before])
    assert after.job["source_sha256"] != before.job["source_sha256"]


def test_a_branch_starts_with_the_weights_of_the_version_and_names_it_as_its_input(source: PostTrainConfig):
    config = BranchConfig(run=Plan(source, "source").run_uri, version=2, changes={"grpo.num_iterations": 1})
    branch(config, run_id="branch")
    made = policies(Plan(source, "branch"))
    assert [manifest.job["stage"] for manifest in made] == ["start", "update"]
    origin = artifact(source, "source", "policies/v0002")
    assert weights_sha256(made[:1]) == weights_sha256([origin])
    assert made[0].inputs == {"source": origin.ref}


def test_another_loss_reuses_sft_and_another_reward_reuses_rollouts(source: PostTrainConfig):
    loss = FunctionConfig(fn="tests.flows.functions:reinforce")
    rewards = (RewardConfig(fn="tests.flows.functions:brevity"),)
    for run_id, changes in (("other-loss", {"loss": loss}), ("other-reward", {"rewards": rewards})):
        grpo = source.grpo.model_copy(update={"num_iterations": 1, **changes})
        config = source.model_copy(update={"grpo": grpo, "reuse_from": Plan(source, "source").run_uri})
        post_train(config, run_id=run_id)

    def is_reused(run_id: str, name: str) -> bool:
        return artifact(source, run_id, name).reused_from is not None

    for run_id in ("other-loss", "other-reward"):
        reused = [is_reused(run_id, name) for name in ("policies/v0000", "policies/v0001", "rollouts/v0001")]
        assert reused == [True] * 3
        assert not is_reused(run_id, "policies/v0002")
    assert is_reused("other-loss", "scored/v0001")
    assert not is_reused("other-reward", "scored/v0001")


def test_a_pruned_run_goes_on_and_every_update_can_still_be_recomputed(source: PostTrainConfig):
    grpo = source.grpo.model_copy(update={"num_iterations": 4, "checkpoint_every": 1})
    config = source.model_copy(update={"grpo": grpo, "retention": RetentionConfig(keep_last=1)})
    post_train(config, run_id="pruned")
    run_uri = Plan(config, "pruned").run_uri
    pruned = {manifest.uri[-5:] for manifest in policies(Plan(config, "pruned")) if is_pruned(manifest.uri)}
    # Left: the start, what the updates began from, the newest, and the versions of the two newest train states; the
    # last of these may or may not be there yet when the last prune looks.
    assert pruned in ({"v0002"}, {"v0002", "v0003"})
    rows = replay(ReplayConfig(run=run_uri))
    assert [row["is equal"] for row in rows] == [True] * 4
    post_train(config.model_copy(update={"grpo": grpo.model_copy(update={"num_iterations": 5})}), run_id="pruned")
    assert artifact(config, "pruned", "policies/v0006").job["stage"] == "update"
