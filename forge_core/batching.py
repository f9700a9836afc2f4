"""Sequences packed into rows of fixed length: what the trainer eats.

A row holds several documents side by side. Position `t` predicts the token at `t + 1` of the same document, so the
last token of a document predicts nothing and a document of T tokens trains at most T - 1 positions:

    tokens     a0 a1 a2 b0 b1  0  0  0
    labels     a1 a2  0 b1  0  0  0  0
    positions   0  1  2  0  1  0  1  2      padding is a document of its own, so attention never leaks into it
    mask        -  x  -  x  -  -  -  -      when loss_mask of a is [-, -, x] and of b is [-, x]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from forge_core.update_config import Aggregation


@dataclass(frozen=True)
class TrainSequence:
    """One document: prompt and completion, or a whole chat.

    `loss_mask` is True on the tokens that are trained: the completion in RL, the assistant's turns in SFT.
    """

    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    generator_logprobs: Tensor  # [T] float32, 0 where not trained
    advantage: float = 0.0
    reference_logprobs: Tensor | None = None  # [T] float32, of all sequences of a batch or of none


@dataclass(frozen=True)
class TrainBatch:
    """Packed rows; every tensor is [B, L] and aligned with the token a position predicts."""

    tokens: Tensor  # int64
    labels: Tensor  # int64, the next token of the document, 0 where nothing is predicted
    positions: Tensor  # int64, restarts at 0 with every document
    mask: Tensor  # bool, True where the predicted token is trained
    sequence_ids: Tensor  # int64, index into the sequences that were packed, -1 on padding
    generator_logprobs: Tensor  # float32, 0 where mask is False
    advantages: Tensor  # float32, 0 where mask is False
    weights: Tensor  # float32, what the loss of a token counts for in that of the whole batch, 0 where mask is False
    # Under the policy that the update started from; without it the generator's stand for them.
    proximal_logprobs: Tensor | None = None  # float32, 0 where mask is False
    corrections: Tensor | None = None  # float32, importance weights of the policy loss; without them it counts fully
    reference_logprobs: Tensor | None = None  # float32, 0 where mask is False

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def row_tokens(self) -> int:
        return self.tokens.shape[1]

    def rows(self, index: slice | Tensor) -> TrainBatch:
        """The chosen rows, in the order of `index`."""
        return self._each(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def for_rank(self, rank: int, num_ranks: int) -> TrainBatch:
        """Rows rank, rank + num_ranks, ...: ceil(B / num_ranks) of them, with an empty row where they run out.

        Equal numbers matter because a sharded model is gathered by all ranks together, micro-batch by micro-batch.
        """
        rows_per_rank = -(-self.num_rows // num_ranks)
        own = self.rows(torch.arange(self.num_rows)[rank::num_ranks])
        if own.num_rows == rows_per_rank:
            return own
        return _concatenate(own, _empty_rows(rows_per_rank - own.num_rows, self.row_tokens))

    def micro_batches(self, num_rows: int) -> list[TrainBatch]:
        """The batch cut into pieces of `num_rows` rows; the last piece may be shorter."""
        return [self.rows(slice(start, start + num_rows)) for start in range(0, self.num_rows, num_rows)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        tensors = ((field.name, getattr(self, field.name)) for field in fields(self))
        return TrainBatch(**{name: change(tensor) for name, tensor in tensors if tensor is not None})


def pack_sequences(
    sequences: Sequence[TrainSequence],
    row_tokens: int,
    *,
    aggregation: Aggregation = "token_mean",
    max_tokens: int | None = None,
    idle_lengths: Sequence[int] = (),
) -> TrainBatch:
    """All sequences in as few rows of `row_tokens` as first-fit-decreasing finds, each token with its weight.

    `max_tokens` is the horizon of the aggregation `fixed_horizon`, `idle_lengths` are the trained tokens of completions
    that count in the weights and are not in the batch. A pure function of its input: equal lengths keep their order.
    Raises ValueError for a sequence that does not fit in a row, or that trains its first token, which
    nothing precedes.
    """
    if not sequences:
        raise ValueError("sequences is empty; a batch needs at least one sequence")
    for index, sequence in enumerate(sequences):
        _check_sequence(sequence, index, row_tokens)

    rows: list[list[int]] = []
    free: list[int] = []  # tokens left in each row
    longest_first = sorted(range(len(sequences)), key=lambda index: -len(sequences[index].token_ids))
    for index in longest_first:
        length = len(sequences[index].token_ids)
        row = next((r for r, tokens in enumerate(free) if tokens >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_tokens)
        rows[row].append(index)
        free[row] -= length

    batch = _empty_rows(len(rows), row_tokens)
    if sequences[0].reference_logprobs is not None:
        batch = replace(batch, reference_logprobs=torch.zeros_like(batch.generator_logprobs))
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            start = _write_sequence(batch, row, start, sequences[index], index)
        # Padding restarts at 0 too: without it the padding would continue, and attend to, the last document.
        batch.positions[row, start:] = torch.arange(row_tokens - start)
    weights = token_weights(
        batch.mask, batch.sequence_ids, aggregation, max_tokens=max_tokens, idle_lengths=idle_lengths
    )
    return replace(batch, weights=weights)


def token_weights(
    mask: Tensor,
    sequence_ids: Tensor,
    aggregation: Aggregation,
    *,
    max_tokens: int | None = None,
    idle_lengths: Sequence[int] = (),
) -> Tensor:
    """Weight [B, L] of each trained token in the loss of the batch, 0 elsewhere.

    With N trained tokens, L_i of them in sequence i, and S sequences that have any, those of `idle_lengths` included:

        token_mean      1 / N                   every token counts the same
        sequence_mean   1 / (S L_i)             every sequence counts the same, so a token of a long one counts less
        fixed_horizon   1 / (S max_tokens)      every token counts the same, in batches of short and long completions
    """
    lengths = torch.bincount(sequence_ids[mask])  # by sequence id; those without a trained token have 0
    num_sequences = int((lengths > 0).sum()) + sum(length > 0 for length in idle_lengths)
    match aggregation:
        case "token_mean":
            counts = (lengths.sum() + sum(idle_lengths)).expand(len(lengths))
        case "sequence_mean":
            counts = num_sequences * lengths
        case "fixed_horizon":
            if max_tokens is None or (num_sequences and int(lengths.max()) > max_tokens):
                raise ValueError(
                    f"aggregation fixed_horizon divides by max_tokens, which is {max_tokens}; it must be "
                    "sampling.max_tokens, the longest completion there can be"
                )
            counts = torch.full_like(lengths, num_sequences * max_tokens)
    weights = torch.zeros(mask.shape)
    weights[mask] = 1 / counts[sequence_ids[mask]].float()
    return weights


def _check_sequence(sequence: TrainSequence, index: int, row_tokens: int) -> None:
    length = len(sequence.token_ids)
    if length > row_tokens:
        raise ValueError(
            f"sequences[{index}] has {length} tokens, more than trainer.row_tokens ({row_tokens}); raise row_tokens or "
            "shorten the prompt and max_tokens"
        )
    if length == 0:
        raise ValueError(f"sequences[{index}] has no tokens; drop it before packing")
    if len(sequence.loss_mask) != length or len(sequence.generator_logprobs) != length:
        raise ValueError(
            f"sequences[{index}] has {length} token_ids, {len(sequence.loss_mask)} loss_mask and "
            f"{len(sequence.generator_logprobs)} generator_logprobs; the three must have one entry per token"
        )
    if sequence.loss_mask[0]:
        raise ValueError(
            f"sequences[{index}].loss_mask[0] is True, but no token precedes the first one to predict it from; put a "
            "prompt or BOS token in front, or leave the first token out of the loss"
        )


def _write_sequence(batch: TrainBatch, row: int, start: int, sequence: TrainSequence, index: int) -> int:
    """Where the next document starts, after `sequence` was written into `batch` at [row, start]."""
    end = start + len(sequence.token_ids)
    trained = sequence.loss_mask[1:]  # [T - 1]
    batch.tokens[row, start:end] = sequence.token_ids
    batch.labels[row, start : end - 1] = sequence.token_ids[1:]
    batch.positions[row, start:end] = torch.arange(end - start)
    batch.mask[row, start : end - 1] = trained
    batch.sequence_ids[row, start:end] = index
    for name in ("generator_logprobs", "reference_logprobs"):
        if (logprobs := getattr(sequence, name)) is not None:
            getattr(batch, name)[row, start : end - 1] = torch.where(trained, logprobs[1:].float(), 0.0)
    batch.advantages[row, start : end - 1] = torch.where(trained, float(sequence.advantage), 0.0)
    return end


def _empty_rows(num_rows: int, row_tokens: int) -> TrainBatch:
    shape = (num_rows, row_tokens)
    return TrainBatch(
        tokens=torch.zeros(shape, dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        positions=torch.arange(row_tokens).repeat(num_rows, 1),
        mask=torch.zeros(shape, dtype=torch.bool),
        sequence_ids=torch.full(shape, -1),
        generator_logprobs=torch.zeros(shape),
        advantages=torch.zeros(shape),
        weights=torch.zeros(shape),
    )


def _concatenate(first: TrainBatch, empty: TrainBatch) -> TrainBatch:
    tensors = ((field.name, getattr(first, field.name), getattr(empty, field.name)) for field in fields(TrainBatch))
    return TrainBatch(
        **{
            name: torch.cat([tensor, torch.zeros(empty.mask.shape) if other is None else other])
            for name, tensor, other in tensors
            if tensor is not None
        }
    )
