"""Importance weights for trainer/generator mismatch: golden, by hand, and by exact enumeration."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, tensor

from forge_core.batching import TrainBatch, TrainSequence, pack_sequences
from forge_core.corrections import bounded, importance_weights, with_proximal
from forge_core.losses import grpo, reinforce
from forge_core.trainer.objective import objective
from forge_core.trainer.token_sums import TokenSums
from forge_core.update_config import CorrectionConfig
from tests.forge_core import golden


def packed(generator_logprobs: list[Tensor], advantages: Tensor) -> TrainBatch:
    """Completions with these log-probs, each after a prompt of one token."""
    sequences = [
        TrainSequence(
            token_ids=torch.arange(len(logprobs) + 1),
            loss_mask=torch.arange(len(logprobs) + 1) >= 1,
            generator_logprobs=torch.cat([torch.zeros(1), logprobs]),
            advantage=float(advantage),
        )
        for logprobs, advantage in zip(generator_logprobs, advantages, strict=True)
    ]
    return pack_sequences(sequences, 8)


def placed(batch: TrainBatch, rows: list[Tensor]) -> Tensor:
    """Values by sequence and token at their places in a batch, [B, L]."""
    found = torch.zeros(batch.mask.shape)
    for index, values in enumerate(rows):
        found[(batch.sequence_ids == index) & batch.mask] = values
    return found


def test_golden_clipped_loss_with_truncated_importance_sampling():
    old, new, _, rollout = golden.logprobs()
    lengths = golden.LENGTHS.tolist()
    rows = lambda values: [values[index, :length] for index, length in enumerate(lengths)]  # noqa: E731
    batch = packed(rows(rollout), golden.ADVANTAGES)
    batch, _ = with_proximal(batch, placed(batch, rows(old)), CorrectionConfig(high=2.0))
    current = placed(batch, rows(new))[batch.mask]
    sums = TokenSums(int(batch.mask.sum()))
    loss = objective(grpo, batch, current, torch.zeros_like(current), entropy_coefficient=0.0, sums=sums)
    assert loss.item() == pytest.approx(0.0324396305, abs=1e-6)
    assert sums.sums["loss/policy"].item() == pytest.approx(0.0324396305, abs=1e-6)


MASK, IDS = tensor([[True, True, False, True, True]]), tensor([[0, 0, 0, 1, -1]])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"high": 2.0}, [2.0, 0.5, 1.0]),  # 4, 1/2 and 1
        ({"level": "sequence", "high": 1.5}, [1.5, 1.5, 1.0]),  # 4 * 1/2 = 2 for the first completion
        ({"method": "mask", "low": 0.6, "high": 5.0}, [4.0, 0.0, 1.0]),
        ({"method": "mask", "low": 0.5, "high": 1.5, "level": "sequence"}, [0.0, 0.0, 1.0]),
    ],
)
def test_weights_by_hand(settings, expected):
    correction = CorrectionConfig(**settings)
    log_ratio = tensor([[math.log(4), math.log(0.5), 0.0, 0.0, 0.0]])
    mask = MASK & (IDS >= 0)
    weights = bounded(importance_weights(log_ratio, mask, IDS, correction.level), correction)
    torch.testing.assert_close(weights[mask], tensor(expected))


def test_a_mismatch_is_measured_on_the_trained_tokens():
    generator = [tensor([-1.0, -1.0]), tensor([-2.0])]
    batch = packed(generator, tensor([1.0, -1.0]))
    trainer = [tensor([-1.0 + math.log(2), -1.0]), tensor([-2.0])]  # w = 2, 1, 1
    corrected, metrics = with_proximal(batch, placed(batch, trainer), CorrectionConfig(high=1.5))
    assert metrics["mismatch_ratio/mean"] == pytest.approx(4 / 3)
    assert metrics["mismatch_ratio/max"] == pytest.approx(2)
    assert metrics["mismatch_ratio/effective_sample_size"] == pytest.approx(16 / 18)  # (2+1+1)^2 / (3 (4+1+1))
    assert metrics["kl/mismatch"] == pytest.approx((2 - 1 - math.log(2)) / 3, abs=1e-6)  # w - 1 - log w
    assert metrics["correction/mean"] == pytest.approx(3.5 / 3)
    assert metrics["correction/bounded_fraction"] == pytest.approx(1 / 3)
    assert corrected.corrections is not None
    assert not corrected.corrections.requires_grad


def test_engines_that_agree_need_no_correction():
    batch = packed([tensor([-1.0, -0.5]), tensor([-2.0])], tensor([1.0, -1.0]))
    for method in ("truncate", "mask"):
        corrected, metrics = with_proximal(batch, batch.generator_logprobs, CorrectionConfig(method=method))
        assert (corrected.corrections == 1).all()
        assert (metrics["kl/mismatch"], metrics["mismatch_ratio/max"]) == (0, 1)


def test_without_bounds_the_correction_makes_the_gradient_that_of_the_trainers_policy():
    """Two symbols, enumerated: sampled with .8 and .2 by the generator, .5 and .5 by the trainer; rewards 1 and 0."""
    generator, probabilities = tensor([0.8, 0.2]), tensor([0.5, 0.5])
    batch = packed([generator.log()[:1], generator.log()[1:]], tensor([1.0, 0.0]))
    trainer = placed(batch, [probabilities.log()[:1], probabilities.log()[1:]])
    corrected, _ = with_proximal(batch, trainer, CorrectionConfig(high=1e6))
    corrected = replace(corrected, weights=placed(batch, [generator[:1], generator[1:]]))  # how often each is sampled
    logits = torch.zeros(2, requires_grad=True)
    logprobs = logits.log_softmax(0)
    objective(reinforce, corrected, logprobs, torch.zeros(2), entropy_coefficient=0.0, sums=TokenSums(2)).backward()
    # The gradient of the expected reward p0 in the logits is p0 p1 (1, -1) = (1/4, -1/4).
    torch.testing.assert_close(logits.grad, tensor([-0.25, 0.25]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_batch_without_trained_tokens_has_no_mismatch(level):
    batch = packed([torch.zeros(0)], tensor([1.0]))
    corrected, metrics = with_proximal(batch, batch.generator_logprobs, CorrectionConfig(level=level))
    assert not corrected.mask.any()
    assert (metrics["kl/mismatch"], metrics["mismatch_ratio/mean"], metrics["correction/mean"]) == (0, 1, 1)
