"""KL estimates: golden numbers, exact gradients on a categorical of three symbols, and extremes."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

from forge_core import kl
from tests.forge_core import golden

OLD, NEW, REF, _ = golden.logprobs()
POLICY, REFERENCE, BEHAVIOUR = (
    tensor(logits).double() for logits in ([0.3, -0.5, 0.9], [0.0, 0.2, -0.4], [0.5, 0.1, -0.3])
)


@pytest.mark.parametrize(
    ("estimate", "expected"), [(kl.k1, -0.0093173198), (kl.k2, 0.0245899018), (kl.k3, 0.0255359169)]
)
def test_golden_estimates(estimate, expected):
    assert estimate(NEW, REF)[golden.MASK].mean().item() == pytest.approx(expected, abs=1e-6)


def gradients(estimate, behaviour) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the expected estimate under the behaviour policy's symbols, and of the KL itself, in the policy's logits."""
    logits = POLICY.clone().requires_grad_()
    logprobs, reference, sampled = logits.log_softmax(0), REFERENCE.log_softmax(0), behaviour.log_softmax(0)
    (expected,) = torch.autograd.grad((sampled.exp() * estimate(logprobs, reference, sampled)).sum(), logits)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    return expected, exact


def test_k1_as_a_loss_has_no_expected_gradient():
    found, _ = gradients(lambda lp, lr, lo: kl.k1(lp, lr), POLICY)
    assert found.abs().max() < 1e-12


def test_k2_has_the_gradient_of_the_kl_on_policy():
    found, exact = gradients(lambda lp, lr, lo: kl.k2(lp, lr), POLICY)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("behaviour", [POLICY, BEHAVIOUR])
def test_k3_times_the_ratio_has_the_gradient_of_the_kl_on_and_off_policy(behaviour):
    found, exact = gradients(kl.k3_ratio, behaviour)
    torch.testing.assert_close(found, exact)
    without, _ = gradients(lambda lp, lr, lo: kl.k3(lp, lr), behaviour)
    assert (without - exact).abs().max() > 0.01


def test_k1_and_k3_are_unbiased_in_value():
    logprobs, reference = POLICY.log_softmax(0), REFERENCE.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    for estimate in (kl.k1, kl.k3):
        torch.testing.assert_close((logprobs.exp() * estimate(logprobs, reference)).sum(), exact)


@pytest.mark.parametrize(("logprob", "reference"), [(-0.1, -200.0), (-200.0, -0.1)])
def test_a_token_the_reference_finds_impossible_is_finite_in_value_and_gradient(logprob, reference):
    for estimate in (kl.k1, kl.k2, kl.k3, lambda lp, lr: kl.k3_ratio(lp, lr, tensor([-0.1]))):
        logprobs = tensor([logprob]).requires_grad_()
        value = estimate(logprobs, tensor([reference]))
        value.sum().backward()
        assert value.isfinite().all()
        assert logprobs.grad.isfinite().all()
    assert kl.k3(tensor([logprob]), tensor([reference])).item() == kl.MAX_K3


def test_equal_policies_have_no_kl_exactly():
    for estimate in (kl.k1, kl.k2, kl.k3):
        assert not estimate(NEW, NEW).any()
