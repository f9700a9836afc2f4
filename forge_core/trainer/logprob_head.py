"""An output layer that returns log-probabilities of chosen tokens instead of logits.

Full logits are the largest tensor of a step: [B, L, V] in float32 is 600 MB for 1,000 tokens of a 150k vocabulary, and
softmax and gradient double it. Here only the positions that are trained are projected, a chunk at a time, and the
backward pass computes the chunk's logits again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.linear import Linear

CHUNK_ELEMENTS = 2**25  # logits held at once; 128 MiB in float32


@dataclass(frozen=True)
class TokenQuery:
    """Which log-probabilities a forward pass should return."""

    mask: Tensor  # [B, L] bool, the n positions to evaluate
    labels: Tensor  # [B, L] int64, the token whose log-probability is wanted
    temperature: float


class LogprobHead(Linear):
    """Output layer: logits [B, L, V], or with a `query` its (logprobs [n], entropies [n]), both float32.

    The query is an attribute because the decoder calls its output layer with the hidden states alone, and calling
    inside the decoder keeps the weight gathered when it is sharded.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    query: TokenQuery | None = None

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # pyrefly: ignore [bad-override]
        if self.query is None:
            return F.linear(input, self.weight)
        trained, labels = input[self.query.mask], self.query.labels[self.query.mask]  # [n, D], [n]
        return TokenLogprobs.apply(trained, self.weight, labels, self.query.temperature)


class TokenLogprobs(torch.autograd.Function):
    """(log softmax(hidden @ weight.T / temperature)[labels], entropy of that softmax), both [n], float32 at least.

    Peak memory is a few chunks of CHUNK_ELEMENTS logits, whatever n is. With p the softmax of the scores z, the
    gradient of a log-probability in z is one_hot - p, and that of the entropy H is -p (log p + H). The latter costs
    nothing unless it is asked for.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = (
            torch.empty(len(labels), dtype=_precise(hidden), device=hidden.device) for _ in range(3)
        )
        for rows in _chunks(len(labels), weight.shape[0]):
            scores = _scores(hidden[rows], weight, temperature)  # [c, V]
            normalisers[rows] = scores.logsumexp(-1)
            logprobs[rows] = scores.gather(-1, labels[rows, None]).squeeze(-1) - normalisers[rows]
            probabilities = (scores - normalisers[rows, None]).exp_()
            entropies[rows] = normalisers[rows] - probabilities.mul_(scores).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, normalisers, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an output that the loss does not use has no gradient, rather than zeros
        return logprobs, entropies

    @staticmethod
    def backward(  # pyrefly: ignore [bad-override]
        ctx, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, labels, normalisers, entropies = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalisers)
        grad_hidden = torch.empty_like(hidden)
        # float32: a sum over many chunks. A frozen head has none.
        grad_weight = torch.zeros_like(weight, dtype=_precise(weight)) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(labels), weight.shape[0]):
            scale = (grad_logprobs[rows] / ctx.temperature)[:, None]
            grad_scores = _scores(hidden[rows], weight, ctx.temperature).sub_(normalisers[rows, None])  # log p
            if grad_entropies is None:
                grad_scores.exp_().mul_(-scale)
            else:
                entropy_scale = (grad_entropies[rows] / ctx.temperature)[:, None]
                probabilities = grad_scores.exp()
                grad_scores.add_(entropies[rows, None]).mul_(entropy_scale).add_(scale).mul_(probabilities).neg_()
            grad_scores.scatter_add_(-1, labels[rows, None], scale)  # (one_hot - softmax) * scale
            grad_scores = grad_scores.to(hidden.dtype)
            grad_hidden[rows] = grad_scores @ weight
            if grad_weight is not None:
                grad_weight += grad_scores.T @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _scores(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T).to(_precise(hidden)).div_(temperature)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(num_positions: int, vocab_size: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(start, start + size) for start in range(0, num_positions, size)]
