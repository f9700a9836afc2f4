"""Estimates of KL(policy || reference) per token, from the log-probabilities of tokens that the policy sampled.

With d = lp - lr (http://joschu.net/blog/kl-approx.html): as numbers, k1 and k3 are unbiased, and k3 is never negative.
As losses they are another matter: k1 has zero expected gradient; k2 has the gradient of the KL on policy; k3 has it,
on and off policy, once it is multiplied by the ratio r = exp(lp - lo) to the policy that sampled, gradient included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forge_core.update_config import Estimator

MAX_LOG_RATIO = 20.0  # exp() of more than this overflows float32 sums long before it means anything
MAX_K3 = 10.0


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """log(p / q) of each token, within +-MAX_LOG_RATIO so that its exponential is finite; no gradient beyond that."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d; negative for a token that the reference policy prefers."""
    return log_ratio(logprobs, reference_logprobs)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """d^2 / 2."""
    return log_ratio(logprobs, reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(-d) + d - 1, within [0, MAX_K3]; no gradient beyond that."""
    d = log_ratio(logprobs, reference_logprobs)
    return (torch.expm1(-d) + d).clamp(0, MAX_K3)


def k3_ratio(logprobs: Tensor, reference_logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """r k3 with r = exp(lp - lo): unbiased in value and gradient when the tokens came from the proximal policy."""
    return log_ratio(logprobs, proximal_logprobs).exp() * k3(logprobs, reference_logprobs)


def penalty(estimator: Estimator, logprobs: Tensor, reference_logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """The named estimate of each token."""
    match estimator:
        case "k1":
            return k1(logprobs, reference_logprobs)
        case "k2":
            return k2(logprobs, reference_logprobs)
        case "k3":
            return k3(logprobs, reference_logprobs)
        case "k3_ratio":
            return k3_ratio(logprobs, reference_logprobs, proximal_logprobs)
