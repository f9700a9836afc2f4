"""Policy losses: pure functions from per-token log-probs to a per-token loss.

A loss sees packed rows: several documents side by side in one row of `L` positions. Position `t` predicts the token
at `t + 1` of the same document, and every tensor here is aligned with the *predicted* token. The trainer masks,
aggregates and divides; a loss only does the arithmetic of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of more than this overflows float32 sums long before it means anything


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at; all tensors are [B, L] float32 unless said otherwise.

    `logprobs` carries the gradient and is already divided by the sampling temperature. `generator_logprobs` are the
    ones recorded with the rollout. Positions where `mask` is False hold zeros and never reach the aggregate.
    """

    logprobs: Tensor
    generator_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # [B, L] bool, True on completion tokens that are trained
    sequence_ids: Tensor  # [B, L] int64, which sequence of the row a position belongs to, -1 on padding


@dataclass(frozen=True)
class LossOutput:
    """A per-token loss [B, L], not yet masked or reduced, and per-token metrics [B, L] to be averaged over the mask."""

    per_token: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood of each trained token (supervised fine-tuning)."""
    return LossOutput(-inputs.logprobs)


def grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutput:
    """Clipped policy gradient, max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A).

    r is the ratio of the current policy to the generator, token by token. GRPO (arXiv:2402.03300) with the asymmetric
    clip range of DAPO (arXiv:2503.14476).
    """
    log_ratio = (inputs.logprobs - inputs.generator_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -ratio * inputs.advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages
    with torch.no_grad():
        metrics = {
            "loss/clip_fraction": (clipped > unclipped).float(),
            "ratio/mean": ratio,
            "kl/behavior": torch.exp(-log_ratio) + log_ratio - 1,  # k3 of generator vs current policy
        }
    return LossOutput(torch.maximum(unclipped, clipped), metrics)
