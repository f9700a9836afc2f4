"""What a step minimises, as a sum over tokens whose weights were fixed when the whole batch was packed.

Because of that, loss and gradient are the same however rows fall into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forge_core.batching import TrainBatch
from forge_core.kl import MAX_K3, k3, penalty
from forge_core.losses import LossInputs, LossOutput
from forge_core.trainer.token_sums import TokenSums
from forge_core.update_config import KlConfig

Loss = Callable[[LossInputs], LossOutput]


def objective(
    loss: Loss,
    micro_batch: TrainBatch,
    logprobs: Tensor,
    entropies: Tensor,
    *,
    kl: KlConfig | None = None,
    entropy_coefficient: float,
    sums: TokenSums,
) -> Tensor:
    """Share of a micro-batch in the sum of weight * (correction * policy loss + KL penalty - entropy bonus), a scalar.

    `logprobs` and `entropies` are those of its n trained tokens in row-major order, [n] with gradient. What is to be
    reported of them goes into `sums`.
    """
    mask = micro_batch.mask
    inputs = _loss_inputs(micro_batch, logprobs)
    output = loss(inputs)
    weights = micro_batch.weights[mask]  # [n]
    policy_weights = weights if micro_batch.corrections is None else weights * micro_batch.corrections[mask]
    # Selected before it is multiplied: what a loss returns elsewhere never matters, not even NaN.
    per_token = output.per_token[mask]  # [n]
    total = (per_token * policy_weights).sum()
    if entropy_coefficient:
        total = total - entropy_coefficient * (entropies * weights).sum()
    if inputs.reference_logprobs is not None:
        reference_logprobs = inputs.reference_logprobs[mask]
        distance = k3(logprobs.detach(), reference_logprobs)
        sums.add("kl/reference", distance)
        sums.add("kl/reference_clamped", (distance >= MAX_K3).float())
        if kl is not None and kl.coefficient and kl.place == "loss":
            penalties = penalty(kl.estimated_by, logprobs, reference_logprobs, inputs.proximal_logprobs[mask])
            total = total + kl.coefficient * (penalties * weights).sum()
            sums.add_weighted("loss/kl", penalties, weights)

    sums.add_weighted("loss/policy", per_token, policy_weights)
    sums.add("entropy/mean", entropies)
    sums.add_gap("logprob_gap", (logprobs - micro_batch.generator_logprobs[mask]).abs())
    for name, values in output.metrics.items():
        sums.add(name, values[mask])
    for name, values in output.ratios.items():
        sums.add_ratio(name, values[mask])
    return total


def _loss_inputs(micro_batch: TrainBatch, logprobs: Tensor) -> LossInputs:
    mask = micro_batch.mask
    generator_logprobs = torch.where(mask, micro_batch.generator_logprobs, 0.0)
    proximal, reference = micro_batch.proximal_logprobs, micro_batch.reference_logprobs
    return LossInputs(
        logprobs=torch.zeros(mask.shape, dtype=logprobs.dtype, device=mask.device).masked_scatter(mask, logprobs),
        generator_logprobs=generator_logprobs,
        proximal_logprobs=generator_logprobs if proximal is None else torch.where(mask, proximal, 0.0),
        advantages=torch.where(mask, micro_batch.advantages, 0.0),
        mask=mask,
        sequence_ids=micro_batch.sequence_ids,
        reference_logprobs=None if reference is None else torch.where(mask, reference, 0.0),
    )
