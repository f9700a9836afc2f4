"""Losses against golden numbers, against autograd of the plain formula, and by exact enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, tensor

from forge_core import losses
from forge_core.batching import token_weights
from forge_core.losses import LossInputs, cispo, dapo, grpo, gspo, reinforce, sapo, simple_grpo
from tests.forge_core import golden

OLD, NEW, REF, ROLLOUT = golden.logprobs()
ALL = [reinforce, grpo, dapo, cispo, gspo, sapo, simple_grpo]


def inputs(logprobs: Tensor = NEW) -> LossInputs:
    return LossInputs(
        logprobs=logprobs,
        generator_logprobs=OLD,
        proximal_logprobs=OLD,
        advantages=golden.ADVANTAGES[:, None].expand(8, 5),
        mask=golden.MASK,
        sequence_ids=golden.SEQUENCE_IDS,
        reference_logprobs=REF,
    )


def aggregate(per_token: Tensor, aggregation) -> Tensor:
    weights = token_weights(golden.MASK, golden.SEQUENCE_IDS, aggregation, max_tokens=5)
    return (per_token * weights).sum()


@pytest.mark.parametrize(
    ("loss", "settings", "aggregation", "expected"),
    [
        (grpo, {}, "token_mean", 0.0109436884),
        (grpo, {}, "sequence_mean", 0.0503567755),
        (grpo, {}, "fixed_horizon", 0.0079342),
        (grpo, {"clip_high": 0.28}, "token_mean", 0.0048791911),
        (dapo, {}, "token_mean", 0.0048791911),
        (gspo, {"clip_low": 0.2, "clip_high": 0.2}, "sequence_mean", 0.0384593979),
        (gspo, {}, "sequence_mean", 0.0506850518),
        (sapo, {}, "sequence_mean", -0.0025732517),
        (cispo, {"clip_high": 0.2}, "token_mean", -0.1237296313),
    ],
)
def test_golden_losses(loss, settings, aggregation, expected):
    assert aggregate(loss(inputs(), **settings).per_token, aggregation).item() == pytest.approx(expected, abs=1e-6)


def test_golden_clip_fraction():
    metrics = dapo(inputs()).metrics
    low, high, either = (
        metrics[f"loss/clip_fraction{which}"][golden.MASK].mean().item() for which in ("_low", "_high", "")
    )
    assert either == pytest.approx(0.1379310, abs=1e-6)  # 4 of 29
    assert low + high == pytest.approx(either)


def clip(value: Tensor, low: float, high: float) -> float:
    return min(max(float(value.detach()), 1 - low), 1 + high)


def surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """The clipped objective as a case distinction: a token beyond the bound it was pushed over is a constant."""
    is_over = ratio.detach() > 1 + high if advantage > 0 else ratio.detach() < 1 - low
    return -advantage * (ratio.detach().clamp(1 - low, 1 + high) if is_over else ratio)


def plain(loss, logprobs: Tensor) -> Tensor:
    """Sequence mean of a loss, written out token by token as its paper has it."""
    total = torch.zeros((), dtype=torch.float64)
    for i, length in enumerate(golden.LENGTHS.tolist()):
        a = float(golden.ADVANTAGES[i])
        s = torch.exp((logprobs[i, :length] - OLD[i, :length]).mean())
        for t in range(length):
            lp, r = logprobs[i, t], torch.exp(logprobs[i, t] - OLD[i, t])
            tau = 1.0 if a > 0 else 1.05
            term = {
                "reinforce": -a * lp,
                "grpo": surrogate(r, a, 0.2, 0.2),
                "dapo": surrogate(r, a, 0.2, 0.28),
                "cispo": -clip(r, 1.0, 4.0) * a * lp,
                "gspo": surrogate(s, a, 3e-4, 4e-4),
                "sapo": -4 / tau * torch.sigmoid(tau * (r - 1)) * a,
                "simple_grpo": -lp * a,
            }[loss.__name__]
            total = total + term / length / len(golden.LENGTHS)
    return total


@pytest.mark.parametrize("loss", ALL)
def test_gradients_equal_autograd_of_the_plain_formula(loss):
    found, expected = NEW.clone().requires_grad_(), NEW.double().requires_grad_()
    aggregate(loss(inputs(found)).per_token, "sequence_mean").backward()
    plain(loss, expected).backward()
    assert found.grad.abs().max() > 0.01
    torch.testing.assert_close(found.grad.double(), expected.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", ALL)
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(loss):
    found, expected = OLD.clone().requires_grad_(), OLD.clone().requires_grad_()
    output = loss(inputs(found))
    aggregate(output.per_token, "sequence_mean").backward()
    aggregate(reinforce(inputs(expected)).per_token, "sequence_mean").backward()
    torch.testing.assert_close(found.grad, expected.grad, atol=1e-7, rtol=1e-6)
    assert (output.ratios["ratio"][golden.MASK] == 1).all()
    assert not output.metrics["kl/behavior"].any()
    assert not output.metrics.get("loss/clip_fraction", torch.zeros(1)).any()


def one_token(log_ratio: float, advantage: float) -> LossInputs:
    row = tensor([[-1.0]])
    return LossInputs(row + log_ratio, row, row, tensor([[advantage]]), tensor([[True]]), tensor([[0]]))


def test_clipping_is_told_apart_by_side():
    def fractions(loss, log_ratio: float, advantage: float) -> list[float]:
        metrics = loss(one_token(log_ratio, advantage)).metrics
        return [metrics[f"loss/clip_fraction{which}"].item() for which in ("_low", "_high", "")]

    assert fractions(grpo, 1.0, 1.0) == [0, 1, 1]  # r = 2.7, made likelier already
    assert fractions(grpo, 1.0, -1.0) == [0, 0, 0]  # r = 2.7, must come down: keeps its gradient
    assert fractions(grpo, -1.0, -1.0) == [1, 0, 1]
    assert fractions(grpo, -1.0, 1.0) == [0, 0, 0]
    assert fractions(cispo, 2.0, 1.0) == [0, 1, 1]  # r = 7.4 > 5
    assert fractions(cispo, -9.0, 1.0) == [0, 0, 0]  # no lower bound


def test_dual_clip_bounds_the_loss_of_a_token_grown_far_too_likely():
    output = dapo(one_token(2.0, -0.5))  # r = 7.39, plain loss 3.69
    assert output.per_token.item() == pytest.approx(1.5)  # 3 * .5
    assert output.metrics["loss/dual_clip_fraction"].item() == 1
    assert dapo(one_token(1.0, -0.5)).per_token.item() == pytest.approx(0.5 * 2.7182818, abs=1e-6)


def test_an_extreme_ratio_is_finite_and_counted():
    for log_ratio in (-200.0, 200.0):
        for loss in (reinforce, grpo, dapo, cispo, gspo, sapo):
            extreme = one_token(log_ratio, -1.0)
            logprobs = extreme.logprobs.clone().requires_grad_()
            output = loss(replace(extreme, logprobs=logprobs))
            output.per_token.sum().backward()
            assert output.per_token.isfinite().all(), loss.__name__
            assert logprobs.grad.isfinite().all(), loss.__name__
            assert output.metrics["ratio/clamped"].item() == 1
    assert grpo(one_token(19.0, -1.0)).metrics["ratio/clamped"].item() == 0


def test_sequence_means_are_over_trained_tokens_alone():
    values, ids = tensor([[1.0, 2, 9, 4, 7]]), tensor([[0, 0, 0, 1, -1]])
    mask = tensor([[True, True, False, True, False]])
    assert losses.sequence_mean(values, mask, ids).tolist() == [[1.5, 1.5, 0, 4, 0]]


def test_no_metric_name_is_a_directory_of_another():
    for loss in ALL:
        output = loss(inputs())
        names = [*output.metrics, *(f"{name}/mean" for name in output.ratios)]
        assert not [(a, b) for a in names for b in names if b.startswith(f"{a}/")]


# Exact enumeration: a categorical over three symbols, logits as parameters.

LOGITS, BEHAVIOUR = tensor([0.3, -0.5, 0.9]).double(), tensor([-0.2, 0.4, 0.1]).double()
REWARD = tensor([1.0, 0.0, 3.0]).double()


def expected_gradient(loss, *, logits: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    """Gradient in the logits of the expectation over the behaviour policy's symbols of a one-token loss, [3]."""
    logits = logits.clone().requires_grad_()
    old = behaviour.log_softmax(0)[None]
    mask, ids = torch.ones(1, 3, dtype=torch.bool), torch.arange(3)[None]
    symbols = LossInputs(logits.log_softmax(0)[None], old, old, advantages[None], mask, ids)
    (old.exp() * loss(symbols).per_token).sum().backward()
    return logits.grad


def gradient_of_expected_reward(logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    (logits.softmax(0) @ REWARD).backward()
    return logits.grad


@pytest.mark.parametrize("loss", [reinforce, grpo, dapo, cispo, gspo, sapo])
@pytest.mark.parametrize("baseline", [0.0, 1.0, -2.5])
def test_on_policy_every_loss_climbs_the_expected_reward_with_any_baseline(loss, baseline):
    found = expected_gradient(loss, logits=LOGITS, behaviour=LOGITS, advantages=REWARD - baseline)
    torch.testing.assert_close(found, -gradient_of_expected_reward(LOGITS), atol=1e-7, rtol=0)


def test_off_policy_the_unclipped_surrogate_still_climbs_the_expected_reward_and_reinforce_does_not():
    off_policy = {"logits": LOGITS, "behaviour": BEHAVIOUR, "advantages": REWARD}
    wide = expected_gradient(lambda inputs: grpo(inputs, clip_low=1.0, clip_high=9.0), **off_policy)
    torch.testing.assert_close(wide, -gradient_of_expected_reward(LOGITS), atol=1e-7, rtol=0)
    biased = expected_gradient(reinforce, **off_policy)
    assert (biased + gradient_of_expected_reward(LOGITS)).abs().max() > 0.1
