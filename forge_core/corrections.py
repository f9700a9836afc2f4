"""Importance weights for a generator and a trainer that disagree on the probabilities of one policy.

Rollouts come from the generator, so an expectation under the trainer's policy weighs each of them by
w = exp(lo - lg): lo are the log-probs of the trainer when the update began, lg those recorded with the rollout. Both
are numbers of the batch, so the weights are too, and carry no gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from forge_core import kl
from forge_core.batching import TrainBatch
from forge_core.losses import sequence_sum
from forge_core.update_config import CorrectionConfig


def with_proximal(
    batch: TrainBatch, proximal_logprobs: Tensor, correction: CorrectionConfig | None
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with the trainer's log-probs [B, L] and its corrections, and how far trainer and generator differ.

    `kl/mismatch` is k3 of KL(generator || trainer). `mismatch_ratio` is w of single tokens before any correction; its
    effective sample size is a fraction of the tokens.
    """
    mask = batch.mask
    log_ratio = torch.where(mask, kl.log_ratio(proximal_logprobs, batch.generator_logprobs), 0.0)
    metrics = _mismatch(batch.generator_logprobs[mask], proximal_logprobs[mask])
    batch = replace(batch, proximal_logprobs=proximal_logprobs)
    if correction is None:
        return batch, metrics
    plain = importance_weights(log_ratio, mask, batch.sequence_ids, correction.level)
    weights = bounded(plain, correction)
    changed = (weights != plain)[mask]
    metrics |= {
        "correction/mean": weights[mask].double().mean().item() if mask.any() else 1.0,
        "correction/bounded_fraction": changed.double().mean().item() if mask.any() else 0.0,
    }
    return replace(batch, corrections=weights), metrics


def importance_weights(log_ratio: Tensor, mask: Tensor, sequence_ids: Tensor, level: str) -> Tensor:
    """w [B, L] of each token, or at each token that of its sequence: the product over the trained tokens."""
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, mask, sequence_ids).clamp(-kl.MAX_LOG_RATIO, kl.MAX_LOG_RATIO)
    return log_ratio.exp()


def bounded(weights: Tensor, correction: CorrectionConfig) -> Tensor:
    """Weights kept within [low, high] (truncated importance sampling), or 0 outside of it (IcePop)."""
    if correction.method == "truncate":
        return weights.clamp(correction.low, correction.high)
    return torch.where((weights >= correction.low) & (weights <= correction.high), weights, 0.0)


def _mismatch(generator_logprobs: Tensor, trainer_logprobs: Tensor) -> dict[str, float]:
    if len(generator_logprobs) == 0:
        generator_logprobs = trainer_logprobs = torch.zeros(1)  # no token, no mismatch
    ratio = kl.log_ratio(trainer_logprobs, generator_logprobs).double().exp()
    return {
        "kl/mismatch": kl.k3(generator_logprobs, trainer_logprobs).double().mean().item(),
        "mismatch_ratio/mean": ratio.mean().item(),
        "mismatch_ratio/max": ratio.max().item(),
        "mismatch_ratio/effective_sample_size": (ratio.mean().square() / ratio.square().mean()).item(),
    }
