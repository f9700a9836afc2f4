"""Policy losses: pure functions from per-token log-probs to a per-token loss.

A loss sees packed rows: several documents side by side in one row of `L` positions. Position `t` predicts the token
at `t + 1` of the same document, and every tensor here is aligned with the *predicted* token. The trainer masks,
aggregates and divides; a loss only does the arithmetic of one token.

In the formulas `lp` is `logprobs`, `lo` is `proximal_logprobs`, `r = exp(lp - lo)` and `A` the advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forge_core import kl


@dataclass(frozen=True)
class LossInputs:
    """What a loss may look at; all tensors are [B, L] float32 unless said otherwise.

    `logprobs` carries the gradient and is already divided by the sampling temperature. `generator_logprobs` are the
    ones recorded with the rollout, `proximal_logprobs` those of the policy that the update started from (the recorded
    ones, unless the update computes its own), `reference_logprobs` those of a frozen reference policy, if there is one.
    Positions where `mask` is False hold zeros and never reach the aggregate.
    """

    logprobs: Tensor
    generator_logprobs: Tensor
    proximal_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # [B, L] bool, True on completion tokens that are trained
    sequence_ids: Tensor  # [B, L] int64, which sequence of the row a position belongs to, -1 on padding
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A per-token loss [B, L], not yet masked or reduced, and per-token numbers [B, L] to report.

    `metrics` are averaged over the mask. `ratios` are importance weights: of each, the mean, the largest and the
    effective sample size are reported.
    """

    per_token: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    ratios: dict[str, Tensor] = field(default_factory=dict)


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """Negative log-likelihood of each trained token (supervised fine-tuning)."""
    return LossOutput(-inputs.logprobs)


def reinforce(inputs: LossInputs) -> LossOutput:
    """-A lp, the plain policy gradient; off policy it needs an importance correction."""
    return LossOutput(-inputs.advantages * inputs.logprobs, _drift(inputs), {"ratio": _log_ratio(inputs).exp()})


def grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossOutput:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), token by token.

    GRPO (arXiv:2402.03300), with the clipped surrogate of PPO (arXiv:1707.06347). Dr. GRPO (arXiv:2503.20783) is this
    loss with `group_mean` advantages and the aggregation `fixed_horizon`.
    """
    ratio = _log_ratio(inputs).exp()
    per_token, metrics = _clipped(ratio, inputs.advantages, clip_low, clip_high)
    return LossOutput(per_token, metrics | _drift(inputs), {"ratio": ratio})


def dapo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0) -> LossOutput:
    """The loss of GRPO with a wider upper clip, and for A < 0 never more than -dual_clip A.

    DAPO (arXiv:2503.14476). The second bound is dual-clip PPO (arXiv:1912.09729): a token whose probability has grown
    far beyond the proximal policy's does not dominate the batch.
    """
    ratio = _log_ratio(inputs).exp()
    per_token, metrics = _clipped(ratio, inputs.advantages, clip_low, clip_high)
    bound = -dual_clip * inputs.advantages
    is_bounded = (inputs.advantages < 0) & (per_token > bound)
    metrics["loss/dual_clip_fraction"] = is_bounded.float()
    return LossOutput(torch.where(is_bounded, bound, per_token), metrics | _drift(inputs), {"ratio": ratio})


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutput:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A lp: the weight is clipped, and no token loses its gradient.

    CISPO (arXiv:2506.13585); clip_low = 1 means no lower bound.
    """
    ratio = _log_ratio(inputs).detach().exp()
    is_low, is_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    per_token = -ratio.clamp(1 - clip_low, 1 + clip_high) * inputs.advantages * inputs.logprobs
    return LossOutput(per_token, _clip_fractions(is_low, is_high) | _drift(inputs), {"ratio": ratio})


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """GRPO's clip on the ratio of the whole sequence, s = exp(mean over its tokens of lp - lo).

    GSPO (arXiv:2507.18071). Every token of a sequence has the value of s and its own share of the gradient, s grad(lp),
    so that their mean has the gradient of s.
    """
    token_log_ratio = _log_ratio(inputs)
    log_s = sequence_mean(token_log_ratio.detach(), inputs.mask, inputs.sequence_ids)
    s = torch.exp(log_s + inputs.logprobs - inputs.logprobs.detach())
    per_token, metrics = _clipped(s, inputs.advantages, clip_low, clip_high)
    ratios = {"ratio": token_log_ratio.exp(), "sequence_ratio": s}
    return LossOutput(per_token, metrics | _drift(inputs), ratios)


def sapo(inputs: LossInputs, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> LossOutput:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a soft gate in place of the clip, with tau by the sign of A.

    SAPO (arXiv:2511.20347). The gate is 4 sigmoid (1 - sigmoid), which scales the gradient of -r A: 1 on policy, and
    less the further r is from 1.
    """
    ratio = _log_ratio(inputs).exp()
    tau = torch.where(inputs.advantages > 0, temperature_positive, temperature_negative)
    soft = torch.sigmoid(tau * (ratio - 1))
    metrics = {"loss/gate_mean": 4 * soft * (1 - soft)}
    return LossOutput(-4 / tau * soft * inputs.advantages, metrics | _drift(inputs), {"ratio": ratio})


def simple_grpo(inputs: LossInputs) -> LossOutput:
    """-r A with r = 1 in value, for one step on policy.

    The policy part of torchforge's `simple_grpo_loss`; its other part, 0.1 k3, is the setting `kl`.
    """
    on_policy = torch.exp(inputs.logprobs - inputs.logprobs.detach())
    return LossOutput(-on_policy * inputs.advantages, _drift(inputs), {"ratio": _log_ratio(inputs).exp()})


def sequence_sum(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """At each trained token, the sum of `values` over the trained tokens of its sequence; 0 elsewhere, [B, L].

    Summed segment by segment, not scattered: on a GPU a scatter adds in another order each time.
    """
    if not mask.any():
        return torch.zeros_like(values)
    # A sequence lies whole in one row, so its tokens follow each other.
    _, owner, lengths = sequence_ids[mask].unique_consecutive(return_inverse=True, return_counts=True)  # [n], [S]
    sums = torch.segment_reduce(values[mask], "sum", lengths=lengths)  # [S]
    return torch.zeros_like(values).masked_scatter(mask, sums[owner])


def sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """At each trained token, the mean of `values` over the trained tokens of its sequence; 0 elsewhere, [B, L]."""
    lengths = sequence_sum(torch.ones_like(values), mask, sequence_ids)
    return sequence_sum(values, mask, sequence_ids) / lengths.clamp(min=1)


def _log_ratio(inputs: LossInputs) -> Tensor:
    return kl.log_ratio(inputs.logprobs, inputs.proximal_logprobs)


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate, and which of its tokens have lost their gradient to the lower and the upper bound."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    is_clipped = clipped > unclipped
    metrics = _clip_fractions(is_clipped & (advantages < 0), is_clipped & (advantages > 0))
    return torch.maximum(unclipped, clipped), metrics


def _clip_fractions(is_low: Tensor, is_high: Tensor) -> dict[str, Tensor]:
    return {
        "loss/clip_fraction": (is_low | is_high).float(),
        "loss/clip_fraction_low": is_low.float(),
        "loss/clip_fraction_high": is_high.float(),
    }


@torch.no_grad()
def _drift(inputs: LossInputs) -> dict[str, Tensor]:
    """How far the policy is from those it is compared with."""
    return {
        # KL(generator || policy), from the generator's samples.
        "kl/behavior": kl.k3(inputs.generator_logprobs, inputs.logprobs),
        "ratio/clamped": ((inputs.logprobs - inputs.proximal_logprobs).abs() > kl.MAX_LOG_RATIO).float(),
    }
