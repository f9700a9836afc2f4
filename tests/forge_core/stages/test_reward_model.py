"""Training of a reward model: its loss, a run that learns and is resumed to the bit, and the reward that loads it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from forge_core.config import FreshPolicyConfig, PolicyConfig, RewardModelRunConfig
from forge_core.data_config import DatasetConfig
from forge_core.datasets import arithmetic
from forge_core.fit_config import RewardModelConfig, ValidationConfig
from forge_core.jobs import RewardModelJob
from forge_core.plan import Plan
from forge_core.rewards.reward_model import reward_model as reward
from forge_core.side_jobs import reward_model_job
from forge_core.stages import dataset, reward_model, start
from forge_core.stages.reward_model import Preferences, describe, read_pairs
from forge_core.stages.workspace import Workspace
from forge_core.trainer.scalar_trainer import ScalarTrainer
from forge_core.trainer_config import OptimizerConfig, TrainerConfig

SHAPE = FreshPolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
# Rejected is the right sum plus one: told from the chosen one by its last digit.
SUMS = DatasetConfig(fn="arithmetic", kwargs={"max_number": 4, "pairs": True})


@pytest.fixture
def prepare(tmp_path: Path):
    """Make a job whose inputs are committed, and a workspace for it."""
    torch.set_num_threads(1)
    workspace = Workspace(tmp_path / "scratch")
    workspace.scratch.mkdir()

    def _prepare(run_id: str = "run", row_tokens: int = 48, **settings) -> tuple[RewardModelJob, Workspace]:
        given = {"dataset": SUMS, "optimizer": OptimizerConfig(learning_rate=5e-3), "batch_size": 8} | settings
        config = RewardModelRunConfig(
            root=str(tmp_path / "store"),
            policy=PolicyConfig(fresh=SHAPE),
            trainer=TrainerConfig(row_tokens=row_tokens),
            reward_model=RewardModelConfig(**given),
        )
        plan = Plan(config, run_id)

        def commit(stage, job):
            workspace.begin_job(job)
            return stage.run(job, workspace).ref

        validation = config.reward_model.validation
        heldout = commit(dataset, plan.dataset(validation.dataset)) if validation else None
        policy, pairs = commit(start, plan.start()), commit(dataset, plan.dataset(SUMS))
        return reward_model_job(plan, policy, pairs, heldout), workspace

    return _prepare


def run(job: RewardModelJob, workspace: Workspace):
    workspace.begin_job(job)
    manifest = reward_model.run(job, workspace)
    workspace.finish_job()
    return manifest


def test_a_reward_model_learns_which_sums_are_right_and_the_reward_says_so(prepare):
    validation = ValidationConfig(dataset=SUMS, num_examples=10, every=100)
    manifest = run(*prepare(num_steps=200, optimizer=OptimizerConfig(learning_rate=2e-3), validation=validation))
    assert manifest.kind == "reward_model"
    assert manifest.summary["reward_model/accuracy"] > 0.95
    assert manifest.summary["reward_model/validation_accuracy"] > 0.95
    assert manifest.summary["reward_model/validation_loss"] < 0.5 * math.log(2)
    examples = list(arithmetic(max_number=4, pairs=True))
    answers = [text for example in examples for text in (str(example.answer), str(example.metadata["rejected"]))]
    found = reward(answers, [example for example in examples for _ in (0, 1)], weights=manifest.uri)
    scores = torch.tensor(found.values).unflatten(0, (-1, 2))
    assert describe(scores)["accuracy"] > 0.95


def test_the_loss_is_that_of_bradley_and_terry_with_scores_kept_near_0(prepare):
    job, workspace = prepare(center_coefficient=0.5)
    course = Preferences(None, job, [], "", [])  # type: ignore[arg-type]  no weights are needed
    scores = torch.tensor([[1.0, 1.0], [2.0, -1.0]])
    expected = [math.log(2) + 0.5 * 4, math.log(1 + math.exp(-3)) + 0.5 * 1]
    assert course._losses(scores).tolist() == pytest.approx(expected)
    assert describe(scores) == {"accuracy": 0.5, "margin": 1.5}
    assert workspace.scratch.exists()


def test_cutting_a_batch_up_changes_no_gradient(prepare):
    job, workspace = prepare()
    _, policy_dir = workspace.fetch(job.policy)
    _, dataset_dir = workspace.fetch(job.dataset)
    pairs = read_pairs(dataset_dir / "examples.jsonl", policy_dir, job)
    norms, losses = [], []
    for micro in (8, 3, 1):
        settings = job.reward_model.model_copy(update={"micro_batch_pairs": micro})
        trainer = ScalarTrainer(policy_dir, settings.optimizer, 10, seed=0)
        course = Preferences(trainer, job.model_copy(update={"reward_model": settings}), pairs, "", [])
        metrics = course.step(list(range(8)))
        norms.append(metrics["grad_norm/total"])
        losses.append(metrics["loss/policy"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_a_training_that_dies_goes_on_from_its_snapshot_to_the_same_bits(prepare, monkeypatch: pytest.MonkeyPatch):
    settings = {"num_steps": 6, "checkpoint_every": 2, "optimizer": OptimizerConfig(schedule="cosine", warmup_steps=2)}
    whole = run(*prepare("whole", **settings))
    job, workspace = prepare("killed", **settings)
    step, taken = Preferences.step, []

    def dying(self: Preferences, indices: list[int]) -> dict[str, float]:
        taken.append(indices)
        if len(taken) == 6:
            raise KeyboardInterrupt
        return step(self, indices)

    monkeypatch.setattr(Preferences, "step", dying)
    with pytest.raises(KeyboardInterrupt):
        run(job, workspace)
    resumed = run(job, workspace)
    assert len(taken) == 6 + 2  # the snapshot of step 4 was gone on from
    assert resumed.sha256_of("model.safetensors") == whole.sha256_of("model.safetensors")
    assert resumed.sha256_of("history.jsonl") == whole.sha256_of("history.jsonl")


def test_a_pair_that_does_not_fit_is_left_out_and_counted(prepare):
    # <|user|>1+1=<|end|><|assistant|>2<|end|> are 9 tokens; 4+4=8 has a rejected answer of one digit, 9, too.
    manifest = run(*prepare(row_tokens=9, num_steps=1))
    with_ten = sum(len(str(e.metadata["rejected"])) == 2 for e in arithmetic(max_number=4, pairs=True))
    assert manifest.summary["reward_model/pairs_too_long"] == with_ten
    with pytest.raises(ValueError, match=r"none of \d+ pairs fits into trainer.row_tokens \(8\); raise it"):
        run(*prepare("none", row_tokens=8, num_steps=1))


def test_a_reward_model_trains_in_one_rank(tmp_path: Path):
    config = RewardModelRunConfig(root=str(tmp_path), trainer=TrainerConfig(num_ranks=2))
    with pytest.raises(ValueError, match="num_ranks is 2; a reward model trains in one"):
        Plan(config, "run").check()
