"""Sequences packed into rows of fixed length: what the trainer eats.

A row holds several documents side by side. Position `t` predicts the token at `t + 1` of the same document, so the
last token of a document predicts nothing and a document of T tokens trains at most T - 1 positions:

    tokens     a0 a1 a2 b0 b1  0  0  0
    labels     a1 a2  0 b1  0  0  0  0
    positions   0  1  2  0  1  0  1  2      padding is a document of its own, so attention never leaks into it
    mask        -  x  -  x  -  -  -  -      when loss_mask of a is [-, -, x] and of b is [-, x]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainSequence:
    """One document: prompt and completion, or a whole chat.

    `loss_mask` is True on the tokens that are trained: the completion in RL, the assistant's turns in SFT.
    """

    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    generator_logprobs: Tensor  # [T] float32, 0 where not trained
    advantage: float = 0.0


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

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def row_tokens(self) -> int:
        return self.tokens.shape[1]

    def rows(self, index: slice | Tensor) -> TrainBatch:
        """The chosen rows, in the order of `index`."""
        return TrainBatch(*(getattr(self, field.name)[index] for field in fields(self)))

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same batch on `device`."""
        return TrainBatch(*(getattr(self, field.name).to(device) for field in fields(self)))

    def for_rank(self, rank: int, num_ranks: int) -> TrainBatch:
        """Rows rank, rank + num_ranks, ...: ceil(B / num_ranks) of them, with an empty row where they run out.

        Equal numbers matter because a sharded model is gathered by all ranks together, micro-batch by micro-batch.
        """
        rows_per_rank = -(-self.num_rows // num_ranks)
        own = self.rows(torch.arange(rank, self.num_rows, num_ranks))
        if own.num_rows == rows_per_rank:
            return own
        return _concatenate(own, _empty_rows(rows_per_rank - own.num_rows, self.row_tokens))

    def micro_batches(self, num_rows: int) -> list[TrainBatch]:
        """The batch cut into pieces of `num_rows` rows; the last piece may be shorter."""
        return [self.rows(slice(start, start + num_rows)) for start in range(0, self.num_rows, num_rows)]


def pack_sequences(sequences: Sequence[TrainSequence], row_tokens: int) -> TrainBatch:
    """All sequences in as few rows of `row_tokens` as first-fit-decreasing finds.

    A pure function of its input: equal lengths keep their order. Raises ValueError for a sequence that does not fit
    in a row, or that trains its first token, which nothing precedes.
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
    for row, members in enumerate(rows):
        start = 0
        for index in members:
            start = _write_sequence(batch, row, start, sequences[index], index)
        # Padding restarts at 0 too: without it the padding would continue, and attend to, the last document.
        batch.positions[row, start:] = torch.arange(row_tokens - start)
    return batch


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
    logprobs = sequence.generator_logprobs[1:].float()
    batch.generator_logprobs[row, start : end - 1] = torch.where(trained, logprobs, 0.0)
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
    )


def _concatenate(first: TrainBatch, second: TrainBatch) -> TrainBatch:
    pairs = ((getattr(first, field.name), getattr(second, field.name)) for field in fields(TrainBatch))
    return TrainBatch(*(torch.cat(pair) for pair in pairs))
