"""Stages that fail, in real stage processes: what is tried again, how, and what is left when a run stops."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forge_core import storage
from forge_core.artifacts import Manifest, read_manifest
from forge_core.config import PostTrainConfig
from forge_core.faults import Fault, FaultPlan
from forge_core.operation import TimeLimitsConfig, WarmthConfig
from forge_core.plan import Plan
from tasks.failures import StageStoppedError
from tasks.processes import stage_processes
from tests.pipeline import events, run_pipeline, tiny_config, weights_sha256, with_retries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def one_iteration(root: Path, *faults: Fault, **changes) -> PostTrainConfig:
    """The smoke-test recipe with a single update, struck by these faults."""
    config = tiny_config(str(root), **changes)
    grpo = config.grpo.model_copy(update={"num_iterations": 1, "checkpoint_every": 1})
    return config.model_copy(update={"grpo": grpo, "fault_plan": FaultPlan(faults=faults)})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return run_pipeline(one_iteration(tmp_path_factory.mktemp("undisturbed")), "run")


def test_out_of_memory_makes_the_same_update_in_smaller_pieces_and_the_same_rollouts_in_a_fresh_engine(
    undisturbed, tmp_path: Path
):
    faults = (
        Fault(job="update v0002", action="out_of_memory"),
        Fault(job="rollout v0001", action="out_of_memory", times=2),
    )
    config = one_iteration(tmp_path, *faults)
    made = run_pipeline(config, "run")
    rollouts = read_manifest(f"{Plan(config, 'run').run_uri}/rollouts/v0001")
    assert rollouts is not None
    # A fresh engine first, then half the sequences at once: neither changes what is sampled.
    assert rollouts.job["memory_halvings"] == 1
    assert weights_sha256(made)[:-1] == weights_sha256(undisturbed)[:-1]
    # One row of 128 tokens at a time became one of 64; the gradient is the same sum in another order.
    assert made[-1].summary["update/memory_halvings"] == 1
    assert made[-1].job_digest == undisturbed[-1].job_digest
    expected, found = (_weights(manifests[-1]) for manifests in (undisturbed, made))
    for name, tensor in expected.items():
        assert (tensor - found[name]).abs().max() < 1e-6, name


def test_a_gradient_that_is_not_finite_is_tried_again_once_and_changes_nothing(undisturbed, tmp_path: Path):
    config = one_iteration(tmp_path, Fault(job="update v0002", action="not_finite"))
    assert weights_sha256(run_pipeline(config, "run")) == weights_sha256(undisturbed)
    assert sum(event["job"] == "update v0002" for event in events(config, "attempt")) == 2


def test_a_gradient_that_stays_not_finite_stops_the_run_and_names_its_rollouts(tmp_path: Path):
    config = one_iteration(tmp_path, Fault(job="update v0002", action="not_finite", times=2))
    with pytest.raises(StageStoppedError, match=r"not_finite.* after 2 attempts.*/rollouts/v0001.*/scored/v0001"):
        run_pipeline(config, "run")
    run_uri = Plan(config, "run").run_uri
    assert read_manifest(f"{run_uri}/policies/v0002") is None
    assert read_manifest(f"{run_uri}/train_states/v0002") is None
    assert read_manifest(f"{run_uri}/rollouts/v0001") is not None


def test_a_stage_that_hangs_is_killed_at_its_time_limit_and_done_again(tmp_path: Path):
    limits = TimeLimitsConfig(dataset=45)  # the start of a process counts, and may be slow on a busy machine
    only_scorer = WarmthConfig(trainer=False, generator=False)
    fault = Fault(job="dataset", action="hang")
    config = one_iteration(tmp_path, fault, time_limits=limits, keep_warm=only_scorer)
    plan = Plan(config, "run")
    with stage_processes(config, logging.getLogger("pipeline")) as processes:
        pid = processes.warm("scorer").pid
        started = time.monotonic()
        with_retries(processes)(plan.dataset(config.grpo.dataset))
        assert time.monotonic() - started >= 45
        assert processes.warm("scorer").pid != pid
    assert [event["job"].split()[0] for event in events(config, "attempt")] == ["dataset", "dataset"]


def test_a_kill_while_the_snapshot_is_written_costs_a_replay_and_no_bits(undisturbed, tmp_path: Path, caplog):
    config = one_iteration(tmp_path, Fault(job="update v0002", action="kill", at="answered"))
    longer = config.grpo.model_copy(update={"num_iterations": 2})
    config = config.model_copy(update={"grpo": longer})
    with caplog.at_level(logging.INFO):
        made = run_pipeline(config, "run")
    assert weights_sha256(made)[:-1] == weights_sha256(undisturbed)
    assert "there is no snapshot" in caplog.text
    assert [event["of"] for event in events(config, "replay")] == ["update v0002"]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_publish_the_same_bits_when_one_of_them_is_killed(two_rank_weights, tmp_path: Path, rank: int):
    config = two_ranks(tmp_path, Fault(job="update v0003", action="kill", rank=rank))
    assert weights_sha256(run_pipeline(config, "run")) == two_rank_weights
    assert sum(event["job"] == "update v0003" for event in events(config, "attempt")) == 2


@pytest.fixture(scope="module")
def two_rank_weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return weights_sha256(run_pipeline(two_ranks(tmp_path_factory.mktemp("two-ranks")), "run"))


def two_ranks(root: Path, *faults: Fault) -> PostTrainConfig:
    """Two updates on two trainer ranks."""
    config = tiny_config(str(root), fault_plan=FaultPlan(faults=faults))
    grpo = config.grpo.model_copy(update={"num_iterations": 2})
    return config.model_copy(update={"grpo": grpo, "trainer": config.trainer.model_copy(update={"num_ranks": 2})})


def _weights(manifest: Manifest) -> dict:
    path = storage.local_path(f"{manifest.files_uri}/model.safetensors")
    assert path is not None
    return load_file(path)
