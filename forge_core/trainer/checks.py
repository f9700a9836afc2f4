"""What a training step refuses: a batch that does not fit, and a loss or gradient that is not a number."""

from __future__ import annotations

import math

import torch

from forge_core.batching import TrainBatch
from forge_core.trainer.models import PolicyShape


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm was NaN or infinite; the step was not applied and the weights are unchanged."""


def check_finite(loss: float, grad_norm: float, step: int) -> None:
    """Raise NonFiniteError unless both are finite numbers."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise NonFiniteError(
            f"step {step}: loss is {loss} and gradient norm {grad_norm}; nothing was updated. Look for NaN "
            "advantages or log-probabilities in the batch, or lower optimizer.learning_rate"
        )


def check_batch(batch: TrainBatch, temperature: float, row_tokens: int, shape: PolicyShape) -> None:
    """Raise ValueError for rows longer than those of the trainer, or documents longer than the policy's context."""
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; the trainer divides logits by it, use that of sampling")
    if batch.row_tokens > row_tokens:
        raise ValueError(f"rows have {batch.row_tokens} tokens, more than trainer.row_tokens ({row_tokens})")
    longest = int(torch.where(batch.sequence_ids >= 0, batch.positions, 0).max()) + 1
    if longest > shape.max_positions:
        raise ValueError(
            f"a sequence has {longest} tokens, more than max_position_embeddings ({shape.max_positions}) of "
            "the policy; shorten the prompt and max_tokens"
        )
