"""Schedules, snapshots and resets: a trainer that stops and goes on has the bits of one that did not stop."""

from __future__ import annotations

import pytest
import torch

from forge_core.batching import pack_sequences
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.losses import cross_entropy, grpo
from forge_core.trainer.policy_trainer import PolicyTrainer


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        # After two steps of warm-up the rate falls in equal parts; the step after the last one would have 0.
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        # (1 + cos(pi x)) / 2 for x = 0, 1/4, 1/2, 3/4
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rate_follows_its_schedule_across_a_resume(
    schedule, factors, open_trainer, qwen3, sequences, tmp_path
):
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule=schedule, warmup_steps=2)
    batch = pack_sequences(sequences, 32)
    trainer = open_trainer(qwen3, optimizer=optimizer, total_steps=6)
    rates = [trainer.train_step(batch, grpo)["learning_rate"] for _ in range(3)]
    trainer.save_train_state(tmp_path / "state")
    trainer = open_trainer(qwen3, optimizer=optimizer, total_steps=6)
    trainer.load_train_state(tmp_path / "state")
    rates += [trainer.train_step(batch, grpo)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([1e-3 * factor for factor in factors], rel=1e-5)
    if schedule == "constant":
        trainer.train_step(batch, grpo)
    else:
        with pytest.raises(ValueError, match="step 6 of a schedule of 6"):
            trainer.train_step(batch, grpo)


def test_a_scaled_learning_rate_lasts_one_step(open_trainer, qwen3, sequences, exported):
    trainer = open_trainer(qwen3, optimizer=OptimizerConfig(learning_rate=1e-3))
    batch = pack_sequences(sequences, 32)
    trainer.scale_learning_rate(0.25)
    rates = [trainer.train_step(batch, grpo)["learning_rate"] for _ in range(2)]
    assert rates == [0.25e-3, 1e-3]


def test_weight_decay_pulls_on_every_weight_but_those_of_norms(open_trainer, qwen3, sequences, exported):
    batch, after = pack_sequences(sequences, 32), []
    before = exported(open_trainer(qwen3), qwen3)
    for weight_decay in (0.0, 0.5):
        trainer = open_trainer(qwen3, optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=weight_decay))
        trainer.train_step(batch, grpo)
        after.append(exported(trainer, qwen3))
    for name, weight in before.items():
        # Decoupled (arXiv:1711.05101): the same step of Adam, and in addition 1e-2 * 0.5 of the weight itself.
        expected = torch.zeros_like(weight) if "norm" in name else 0.005 * weight
        torch.testing.assert_close(after[0][name] - after[1][name], expected, atol=1e-6, rtol=0, msg=name)


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(open_trainer, qwen3, sequences, exported, digest, tmp_path):
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule="linear", warmup_steps=1, weight_decay=0.1)
    batches = [pack_sequences(sequences[start:] + sequences[:start], 32) for start in range(4)]

    trainer = open_trainer(qwen3, optimizer=optimizer, total_steps=4)
    for batch in batches[:2]:
        trainer.train_step(batch, grpo)
    trainer.save_train_state(tmp_path / "state")
    for batch in batches[2:]:
        trainer.train_step(batch, grpo)
    unbroken = digest(exported(trainer, qwen3))

    trainer = open_trainer(qwen3, optimizer=optimizer, total_steps=4)
    trainer.load_train_state(tmp_path / "state")
    assert trainer.step == 2
    for batch in batches[2:]:
        trainer.train_step(batch, grpo)
    assert digest(exported(trainer, qwen3)) == unbroken


def test_train_state_replaces_that_of_a_trainer_which_has_moved_on(
    open_trainer, qwen3, sequences, exported, digest, tmp_path
):
    batch = pack_sequences(sequences, 32)
    trainer = open_trainer(qwen3)
    trainer.train_step(batch, grpo)
    trainer.save_train_state(tmp_path / "state")
    trainer.train_step(batch, grpo)
    expected = digest(exported(trainer, qwen3))
    trainer.train_step(batch, grpo)
    trainer.load_train_state(tmp_path / "state")
    assert trainer.step == 1
    trainer.train_step(batch, grpo)
    assert digest(exported(trainer, qwen3)) == expected


def test_reset_optimizer_gives_the_bits_of_opening_the_exported_policy(
    open_trainer, qwen3, sequences, exported, digest, tmp_path
):
    batch = pack_sequences(sequences, 32)
    grpo_optimizer = OptimizerConfig(learning_rate=3e-3, schedule="linear", warmup_steps=1, max_grad_norm=0.1)
    trainer = open_trainer(qwen3, optimizer=OptimizerConfig(learning_rate=1e-2))
    for _ in range(3):
        trainer.train_step(batch, cross_entropy)
    trainer.export_hf(tmp_path / "sft", qwen3)

    trainer.logprobs(batch)  # a pass without gradient leaves its mark on sharded models
    trainer.reset_optimizer(grpo_optimizer, 2)
    assert trainer.step == 0
    warm_metrics = [trainer.train_step(batch, grpo) for _ in range(2)]
    warm = digest(exported(trainer, qwen3))

    trainer = open_trainer(tmp_path / "sft", optimizer=grpo_optimizer, total_steps=2)
    cold_metrics = [trainer.train_step(batch, grpo) for _ in range(2)]
    assert digest(exported(trainer, qwen3)) == warm
    assert cold_metrics == warm_metrics


def test_opening_a_second_trainer_beside_an_open_one_is_an_error(open_trainer, qwen3, sequences, tmp_path):
    first = open_trainer(qwen3)
    with pytest.raises(RuntimeError, match=r"close\(\) the previous PolicyTrainer"):
        PolicyTrainer.open(
            qwen3, trainer=TrainerConfig(), optimizer=OptimizerConfig(), total_steps=1, seed=0, scratch=tmp_path
        )
    first.train_step(pack_sequences(sequences, 32), grpo)  # and the first one goes on
