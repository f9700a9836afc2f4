"""A soft limit on length: completions that come close to the token limit lose reward bit by bit."""

from __future__ import annotations

from torch import Tensor


def overlong_penalties(lengths: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float = 1.0) -> Tensor:
    """What is added to the rewards of completions of these lengths, [N], within [-penalty, 0].

    0 up to max_tokens - buffer_tokens, then linear, and -penalty from max_tokens on (DAPO, arXiv:2503.14476, eq. 13).
    """
    tokens_over = lengths - (max_tokens - buffer_tokens)
    return -penalty * (tokens_over / buffer_tokens).clamp(0, 1)
