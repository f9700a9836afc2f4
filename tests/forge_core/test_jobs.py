"""What makes two jobs the same, and what does not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core.artifacts import Ref
from forge_core.config import (
    DynamicSamplingConfig,
    FunctionConfig,
    OptimizerConfig,
    OverlongConfig,
    PostTrainConfig,
    RewardConfig,
)
from forge_core.faults import Fault, FaultPlan, faults_for
from forge_core.jobs import StageJob
from forge_core.operation import TimeLimitsConfig, WarmthConfig
from forge_core.plan import Plan
from forge_core.update_config import CorrectionConfig, KlConfig, UpdateConfig
from tests.pipeline import tiny_config

POLICY = Ref(kind="policy", uri="file:///a/policies/v0001", digest="1" * 64)
SCORED = Ref(kind="scored", uri="file:///a/scored/v0001", digest="2" * 64)
ROLLOUTS = Ref(kind="rollouts", uri="file:///a/rollouts/v0001", digest="3" * 64)
DATASET = Ref(kind="dataset", uri="file:///a/datasets/x", digest="4" * 64)


def jobs(config: PostTrainConfig) -> dict[str, StageJob]:
    """One job of each stage."""
    plan = Plan(config, "run")
    return {
        "start": plan.start(),
        "sft": plan.sft(POLICY, DATASET),
        "rollout": plan.rollout(POLICY, DATASET, 0),
        "score": plan.score(ROLLOUTS, 0),
        "update": plan.update(POLICY, [SCORED], 0),
        "evaluate": plan.evaluate(POLICY, DATASET, config.evals[0]),
    }


def changed_stages(change: Callable[[PostTrainConfig], PostTrainConfig], root: Path) -> set[str]:
    """Stages whose job is another one after the change."""
    config = tiny_config(str(root))
    before, after = jobs(config), jobs(change(config))
    return {stage for stage in before if before[stage].digest() != after[stage].digest()}


def grpo(**changes) -> Callable[[PostTrainConfig], PostTrainConfig]:
    return lambda config: config.model_copy(update={"grpo": config.grpo.model_copy(update=changes)})


def run(**changes) -> Callable[[PostTrainConfig], PostTrainConfig]:
    return lambda config: config.model_copy(update=changes)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (grpo(loss=FunctionConfig(fn="grpo", kwargs={"clip_low": 0.1})), {"update"}),
        (grpo(rewards=(RewardConfig(fn="exact_number", weight=2.0),)), {"score"}),
        (grpo(minibatches=1), {"update"}),
        (grpo(epochs=2), {"update"}),
        (grpo(aggregation="sequence_mean"), {"update"}),
        (grpo(aggregation="fixed_horizon"), {"update"}),
        (grpo(proximal="trainer"), {"update"}),
        (grpo(proximal="trainer", correction=CorrectionConfig(high=3.0)), {"update"}),
        (grpo(entropy_coefficient=0.01), {"update"}),
        (grpo(kl=KlConfig(coefficient=0.1)), {"update"}),
        (grpo(kl=KlConfig(coefficient=0.1, place="reward")), {"score", "update"}),
        (grpo(drop_uniform=False), {"score"}),
        (grpo(dynamic_sampling=DynamicSamplingConfig()), {"score", "update"}),
        (grpo(alarms={}), set()),
        (grpo(reference_runs_on="trainer"), set()),
        (grpo(overlong=OverlongConfig(buffer_tokens=2)), {"score"}),
        (grpo(drop_truncated=True), {"score"}),
        (grpo(group_size=8), {"rollout"}),
        (run(seed=1), {"start", "sft", "rollout", "update", "evaluate"}),
        # Where, how often, how long and how warm: nothing of that decides a result.
        (grpo(checkpoint_every=1), set()),
        (grpo(num_iterations=7), set()),
        (run(root="s3://elsewhere"), set()),
        (run(keep_warm=WarmthConfig(trainer=False, generator=False, scorer=False)), set()),
        (run(time_limits=TimeLimitsConfig(update=1)), set()),
        (run(name="another"), set()),
        (run(reuse_from="s3://elsewhere/run"), set()),
        (run(fault_plan=FaultPlan(faults=(Fault(job="update", action="kill"),))), set()),
    ],
)
def test_a_setting_changes_the_jobs_that_it_decides_and_no_other(change, expected: set[str], tmp_path: Path):
    assert changed_stages(change, tmp_path) == expected


def test_an_update_carries_every_setting_of_how_it_learns(tmp_path: Path):
    changes = {
        "loss": FunctionConfig(fn="cispo"),
        "aggregation": "fixed_horizon",
        "minibatches": 4,
        "epochs": 3,
        "proximal": "trainer",
        "correction": CorrectionConfig(method="mask", low=0.5, high=5.0),
        "kl": KlConfig(coefficient=0.1, estimator="k2"),
        "entropy_coefficient": 0.02,
    }
    assert changes.keys() == UpdateConfig.model_fields.keys()
    update = jobs(grpo(**changes)(tiny_config(str(tmp_path))))["update"]
    assert {name: getattr(update, name) for name in changes} == changes
    assert update.max_tokens == 4  # sampling.max_tokens, the horizon


def test_a_schedule_counts_every_step_of_every_epoch(tmp_path: Path):
    optimizer = OptimizerConfig(schedule="linear")
    config = grpo(num_iterations=3, minibatches=2, epochs=4, optimizer=optimizer)(tiny_config(str(tmp_path)))
    assert jobs(config)["update"].total_steps == 24


def test_what_a_job_carries_for_one_attempt_is_not_part_of_it(tmp_path: Path):
    job = jobs(tiny_config(str(tmp_path)))["update"]
    plan = FaultPlan(faults=(Fault(job="update", action="kill"),))
    carried = job.model_copy(update={"memory_halvings": 2, "injected": faults_for(job.label, "file:///run", plan)})
    assert carried.digest() == job.digest()


def test_an_input_counts_by_its_digest_and_not_by_where_it_lies(tmp_path: Path):
    plan = Plan(tiny_config(str(tmp_path)), "run")
    moved = POLICY.model_copy(update={"uri": "s3://elsewhere/policies/v0009"})
    other = POLICY.model_copy(update={"digest": "9" * 64})
    assert plan.update(moved, [SCORED], 0).digest() == plan.update(POLICY, [SCORED], 0).digest()
    assert plan.update(other, [SCORED], 0).digest() != plan.update(POLICY, [SCORED], 0).digest()


def test_an_update_of_several_rollout_sets_depends_on_each_of_them_and_on_their_order(tmp_path: Path):
    plan = Plan(tiny_config(str(tmp_path)), "run")
    other = SCORED.model_copy(update={"digest": "5" * 64})
    both = plan.update(POLICY, [SCORED, other], 0)
    assert both.inputs == {"policy": POLICY, "scored": SCORED, "scored_1": other}
    sets = ([SCORED], [other], [SCORED, other], [other, SCORED])
    assert len({plan.update(POLICY, scored, 0).digest() for scored in sets}) == 4


def test_refills_take_the_prompts_that_follow_and_have_names_of_their_own(tmp_path: Path):
    plan = Plan(tiny_config(str(tmp_path)), "run")
    places = [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 2), (2, 0, 2), (2, 1, 2)]  # iteration, refill, refills before
    found = [plan.rollout(POLICY, DATASET, i, refill=r, earlier_refills=before) for i, r, before in places]
    assert [job.first_prompt for job in found] == [0, 8, 16, 24, 32, 40]
    names = [job.output.rpartition("/")[2] for job in found]
    assert names == ["v0001", "v0001-01", "v0001-02", "v0002", "v0003", "v0003-01"]
    assert plan.score(ROLLOUTS, 0, refill=1).output.endswith("/scored/v0001-01")


def test_where_the_reference_policy_runs_is_not_part_of_its_job(tmp_path: Path):
    config = grpo(kl=KlConfig(coefficient=0.1))(tiny_config(str(tmp_path)))
    own, trainer, cpu = (
        Plan(grpo(reference_runs_on=place)(config), "run").reference(POLICY, ROLLOUTS, 0)
        for place in ("own", "trainer", "cpu")
    )
    assert own.digest() == trainer.digest() == cpu.digest()
    assert (own.role, trainer.role, cpu.role) == ("reference", "trainer", "reference")


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("torch", {"start", "sft", "rollout", "score", "update", "evaluate"}),
        ("torchtitan", {"sft", "update"}),
        ("vllm", {"rollout", "evaluate"}),
    ],
)
def test_another_version_of_an_engine_makes_another_job(
    package: str, expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    version = importlib.metadata.version

    def upgraded(name: str) -> str:
        return "999.0" if name in (package, f"{package}-cpu") else version(name)

    def upgrade(config: PostTrainConfig) -> PostTrainConfig:
        monkeypatch.setattr(importlib.metadata, "version", upgraded)
        return config

    config = tiny_config(str(tmp_path))
    before = {stage: job.digest() for stage, job in jobs(config).items()}
    after = {stage: job.digest() for stage, job in jobs(upgrade(config)).items()}
    assert {stage for stage in before if before[stage] != after[stage]} == expected


def test_the_source_of_a_users_reward_is_part_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = RewardConfig(fn="a_users_rewards:shout")
    digests = set()
    for text in ("completion.isupper()", "completion.islower()", "completion.islower()"):
        (tmp_path / "a_users_rewards.py").write_text(f"def shout(completion, example):\n    return float({text})\n")
        digests.add(jobs(grpo(rewards=(reward,))(tiny_config(str(tmp_path))))["score"].digest())
    assert len(digests) == 2
