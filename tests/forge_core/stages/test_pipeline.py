"""Whole runs in real stage processes: warm, cold, killed and resumed runs publish the same bits."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_core import storage
from forge_core.artifacts import ArtifactError, read_manifest
from forge_core.config import PostTrainConfig
from forge_core.faults import Fault, FaultPlan
from forge_core.jobs import StageJob, UpdateJob
from forge_core.operation import WarmthConfig
from forge_core.plan import Plan
from forge_core.stages.process import StageError
from forge_core.update_config import KlConfig
from tasks.processes import stage_processes
from tests.pipeline import COLD, events, in_processes, policies, run_pipeline, steps, tiny_config, weights_sha256

REPO = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Weights of every policy version of a run that nothing happened to."""
    root = str(tmp_path_factory.mktemp("undisturbed"))
    found = weights_sha256(run_pipeline(tiny_config(root), "run"))
    assert len(found) == 5  # start, SFT, three GRPO updates
    assert len(set(found)) == 5  # each stage moved the weights
    return found


def test_cold_processes_publish_the_same_weights_as_warm_ones(undisturbed, tmp_path: Path):
    config = tiny_config(str(tmp_path), keep_warm=COLD, fault_plan=FaultPlan())  # without faults: only the record
    assert weights_sha256(run_pipeline(config, "run")) == undisturbed
    # A cold trainer holds no optimizer. v0003 starts from the snapshot of v0002, v0004 replays v0003 from there.
    assert [event["of"] for event in events(config, "replay")] == ["update v0003"]


def test_an_s3_store_holds_the_same_weights(undisturbed, seaweed_s3: str):
    assert weights_sha256(run_pipeline(tiny_config(f"{seaweed_s3}/pipeline"), "run")) == undisturbed


def test_another_seed_gives_another_policy(undisturbed, tmp_path: Path):
    config = tiny_config(str(tmp_path), seed=1)
    with stage_processes(config, logging.getLogger("pipeline")) as processes:
        start = processes.run(Plan(config, "run").start())
    assert weights_sha256([start]) != undisturbed[:1]


@pytest.mark.parametrize("stage", ["sft", "rollout", "score", "update"])
def test_a_stage_process_killed_at_work_is_replaced_and_the_bits_are_the_same(undisturbed, tmp_path: Path, stage: str):
    config = tiny_config(str(tmp_path))
    killed: list[str] = []
    with stage_processes(config, logging.getLogger("pipeline")) as processes:
        plan, run = Plan(config, "run"), in_processes(processes)

        def run_with_a_kill(job: StageJob):
            # The second job of its kind where there are several: by then the process is warm.
            is_victim = job.stage == stage and (stage == "sft" or job.output.endswith("3"))
            if not is_victim or killed:
                return run(job)
            pid = processes.warm(job.role).pid
            if stage in ("score", "update"):
                os.kill(pid, signal.SIGSTOP)  # a job of milliseconds: it is taken, and never answered
            threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)).start()
            with pytest.raises(StageError, match="SIGKILL") as caught:
                run(job)
            killed.append(caught.value.cause)
            return run(job)

        steps(plan, run_with_a_kill)
        assert killed == ["died"]
        assert weights_sha256(policies(plan)) == undisturbed


@pytest.fixture(scope="module")
def penalised(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Weights of a run that is held near its reference policy, which has a process of its own."""
    return weights_sha256(run_pipeline(with_reference(str(tmp_path_factory.mktemp("penalised"))), "run"))


def with_reference(root: str, runs_on: str = "own", **changes) -> PostTrainConfig:
    config = tiny_config(root, **changes)
    grpo = {"kl": KlConfig(coefficient=0.1), "proximal": "trainer", "reference_runs_on": runs_on}
    return config.model_copy(update={"grpo": config.grpo.model_copy(update=grpo)})


@pytest.mark.parametrize("runs_on", ["own", "trainer"])
def test_a_reference_policy_killed_at_work_gives_the_same_bits_wherever_it_runs(
    undisturbed, penalised, tmp_path: Path, runs_on: str
):
    faults = FaultPlan(faults=(Fault(job="reference v0002", action="kill"),))
    config = with_reference(str(tmp_path), runs_on, fault_plan=faults)
    assert weights_sha256(run_pipeline(config, "run")) == penalised
    assert penalised[:2] == undisturbed[:2]
    assert not set(penalised[3:]) & set(undisturbed)
    run_uri = Plan(config, "run").run_uri
    first, later = (read_manifest(f"{run_uri}/policies/v000{version}") for version in (2, 4))
    assert first is not None
    assert later is not None
    sampled = read_manifest(f"{run_uri}/reference_logprobs/v0001")
    assert sampled is not None
    # At step 0 the policy is its own reference, but for what two engines make of it.
    assert abs(sampled.summary["kl/sampled_k1"]) < 1e-4
    assert first.summary["kl/reference"] < later.summary["kl/reference"]
    attempts = [event["job"] for event in events(config, "attempt") if event["job"].startswith("reference")]
    assert sorted(attempts) == ["reference v0001", "reference v0002", "reference v0002", "reference v0003"]


def test_two_trainer_ranks_stand_in_for_the_reference_policy_with_its_very_bits(penalised, tmp_path: Path):
    found = []
    for runs_on in ("own", "trainer"):
        config = with_reference(str(tmp_path / runs_on), runs_on)
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"num_ranks": 2})})
        found.append(weights_sha256(run_pipeline(config, "run")))
    assert found[0] == found[1]
    assert found[0][0] == penalised[0]
    assert found[0][-1] != penalised[-1]  # another order of addition


def test_cold_reference_policies_give_the_same_bits(penalised, tmp_path: Path):
    cold = with_reference(str(tmp_path), keep_warm=WarmthConfig(reference=False))
    assert weights_sha256(run_pipeline(cold, "run")) == penalised


def test_a_run_resumed_by_a_new_owner_makes_only_what_is_missing(undisturbed, tmp_path: Path):
    config = tiny_config(str(tmp_path))

    def run_until_the_second_update(plan: Plan) -> None:
        with stage_processes(config, logging.getLogger("pipeline")) as processes:
            run = in_processes(processes)

            def run_or_stop(job: StageJob):
                if isinstance(job, UpdateJob) and job.output.endswith("v0003"):
                    raise KeyboardInterrupt
                return run(job)

            steps(plan, run_or_stop)

    with pytest.raises(KeyboardInterrupt):
        run_until_the_second_update(Plan(config, "run"))
    plan = Plan(config, "run")
    before = {uri: read_manifest(uri) for uri in _artifact_uris(plan)}
    assert weights_sha256(run_pipeline(config, "run")) == undisturbed
    after = {uri: read_manifest(uri) for uri in before}
    assert after == before


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_snapshot_is_named_and_replay_goes_further_back(undisturbed, tmp_path: Path, damage: str, caplog):
    config = tiny_config(str(tmp_path))
    run_pipeline(config, "run")
    plan = Plan(config, "run")
    snapshot = read_manifest(f"{plan.run_uri}/train_states/v0002")
    assert snapshot is not None
    for name in ("policies/v0003", "policies/v0004"):
        manifest = storage.local_path(f"{plan.run_uri}/{name}/manifest.json")
        assert manifest is not None
        manifest.unlink()
    path = storage.local_path(f"{snapshot.files_uri}/{snapshot.files[0].path}")
    assert path is not None
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flip" else data[:-1])
    with caplog.at_level(logging.INFO):
        assert weights_sha256(run_pipeline(config, "run")) == undisturbed
    assert "train_states/v0002 cannot be used" in caplog.text
    assert "replaying the update that made" in caplog.text


OWNER = """
import logging, sys, time
from forge_core.update_config import KlConfig
from tasks.processes import stage_processes
from tests.pipeline import tiny_config
with stage_processes(tiny_config(sys.argv[1]), logging.getLogger("owner")) as processes:
    print(*[processes.warm(role).pid for role in ("trainer", "generator", "scorer")], flush=True)
    time.sleep(600)
"""


def test_stage_processes_end_with_their_owner(tmp_path: Path):
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        children = [int(text) for text in owner.stdout.readline().split()]
        time.sleep(3)  # into the imports of the children
        owner.kill()  # no chance to clean up
    assert len(children) == 3
    deadline = time.monotonic() + 60
    while any(_is_alive(child) for child in children):
        assert time.monotonic() < deadline, "a stage process outlived its owner"
        time.sleep(0.2)


def test_trainer_and_generator_agree_on_the_policy_that_sampled(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    one_step = config.grpo.model_copy(update={"num_iterations": 1, "minibatches": 1})
    summary = run_pipeline(config.model_copy(update={"grpo": one_step}), "run")[-1].summary
    assert summary["update/steps"] == 1
    assert summary["logprob_gap/max"] < 1e-4
    assert summary["loss/clip_fraction"] == 0
    assert summary["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert abs(summary["kl/behavior"]) < 1e-6


def test_a_run_id_with_other_settings_is_refused_and_the_difference_named(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    run_pipeline(config, "run")
    changed = config.model_copy(update={"sft": config.sft.model_copy(update={"batch_size": 16})})
    with pytest.raises(ArtifactError, match=r"sft.batch_size \(32 there, 16 here\)"):
        run_pipeline(changed, "run")


def _artifact_uris(plan: Plan) -> list[str]:
    return [
        f"{plan.run_uri}/{kind}/{name}"
        for kind in ("datasets", "policies", "rollouts", "scored")
        for name in storage.list_names(f"{plan.run_uri}/{kind}")
    ]


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
