"""Exact per-document attention on a CPU, where torchtitan's kernels do not run.

FlexAttention has no backward pass on CPU and varlen kernels need CUDA. Documents are padded at their end to the length
of the longest of a block and attended in one causal SDPA call per block. A causal mask already hides what comes after a
token, so the padding is never seen and needs no mask of its own. One call per *document* would be exact too, but costs
5x as much on rows of 14-token documents (25.6 ms against 5.2 ms forward and backward, 1,022 tokens, 6 heads, 1 thread).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention

MAX_PADDING = 0.25  # a document at least this much shorter than a block's longest starts a new block


@dataclass(frozen=True)
class DocumentBlocks:
    """Where the documents of B packed rows lie when they are stacked in padded blocks.

    Token indices count through the flattened [B * L] rows. Block slots that pad a document point at its first token.
    """

    blocks: tuple[Tensor, ...]  # per block: [documents, longest] token index of each slot
    documents: Tensor  # [n] token index of everything that is not row padding, in block order
    slots: Tensor  # [n] slot of these tokens among the slots of all blocks, concatenated


def find_documents(positions: Tensor, sequence_ids: Tensor) -> DocumentBlocks:
    """The blocks of a micro-batch; row padding (sequence id -1) is in none of them. Both arguments are [B, L]."""
    flat_positions = positions.flatten()
    starts = torch.where(flat_positions == 0)[0]
    lengths = torch.diff(starts, append=torch.tensor([len(flat_positions)]))
    is_document = sequence_ids.flatten()[starts] >= 0
    starts, lengths = starts[is_document], lengths[is_document]
    order = torch.argsort(lengths, descending=True, stable=True)
    starts, lengths = starts[order], lengths[order]

    blocks, documents, slots, first, num_slots = [], [], [], 0, 0
    sorted_lengths = lengths.tolist()
    while first < len(sorted_lengths):
        longest = sorted_lengths[first]
        last = first
        while last < len(sorted_lengths) and sorted_lengths[last] > (1 - MAX_PADDING) * longest:
            last += 1
        offsets = torch.arange(longest)[None, :]  # [1, longest]
        is_token = offsets < lengths[first:last, None]  # [documents, longest]
        index = starts[first:last, None] + torch.where(is_token, offsets, 0)
        blocks.append(index)
        documents.append(index[is_token])
        slots.append(torch.where(is_token.flatten())[0] + num_slots)
        num_slots += index.numel()
        first = last
    empty = torch.empty(0, dtype=torch.int64)
    return DocumentBlocks(tuple(blocks), torch.cat(documents or [empty]), torch.cat(slots or [empty]))


class DocumentAttention(VarlenAttention):
    """Attention of packed rows, document by document; the output is 0 on row padding."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(  # pyrefly: ignore [bad-override]  no other keywords are passed
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: DocumentBlocks,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        assert out_transform is None, "an epilogue needs the log-sum-exp, which SDPA does not return"
        batch_size, row_tokens = q_BLNH.shape[:2]
        queries, keys, values = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))  # [B * L, N, H]
        layout = attention_masks
        outputs = []
        queries, keys, values = (_Stack.apply(x, layout) for x in (queries, keys, values))  # [slots, N, H]
        sizes = [index.numel() for index in layout.blocks]
        for index, *parts in zip(layout.blocks, *(x.split(sizes) for x in (queries, keys, values)), strict=True):
            q, k, v = (part.unflatten(0, index.shape).transpose(1, 2) for part in parts)  # [documents, N, longest, H]
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            outputs.append(output.transpose(1, 2).flatten(0, 1))  # [slots of the block, N, H]
        # Rows of nothing but padding: keys and values stay in the graph, since the ranks of a sharded model reduce the
        # gradients of all weights together, and one that had none for some of them would break the others.
        stacked = torch.cat(outputs) if outputs else queries + keys.sum() + values.sum()
        return _Unstack.apply(stacked, layout, batch_size * row_tokens).unflatten(0, (batch_size, row_tokens))


class _Stack(torch.autograd.Function):
    """Rows [B * L, N, H] -> block slots [S, N, H].

    Own backward because every token has exactly one slot of its own: a gather, where autograd would scatter and add.
    Slots that pad a document have zero gradient in attention, so leaving them out is exact.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, layout: DocumentBlocks) -> Tensor:
        ctx.layout, ctx.num_tokens = layout, len(rows)
        if not layout.blocks:
            return rows[:0]
        return rows.index_select(0, torch.cat([index.flatten() for index in layout.blocks]))

    @staticmethod
    def backward(ctx, grad_slots: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore [bad-override]
        return _unstack(grad_slots, ctx.layout, ctx.num_tokens), None


class _Unstack(torch.autograd.Function):
    """Block slots [S, N, H] -> rows [B * L, N, H], 0 on row padding."""

    @staticmethod
    def forward(ctx, slots: Tensor, layout: DocumentBlocks, num_tokens: int) -> Tensor:
        ctx.layout, ctx.num_slots = layout, len(slots)
        return _unstack(slots, layout, num_tokens)

    @staticmethod
    def backward(ctx, grad_rows: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore [bad-override]
        grad_slots = grad_rows.new_zeros(ctx.num_slots, *grad_rows.shape[1:])
        grad_slots[ctx.layout.slots] = grad_rows[ctx.layout.documents]
        return grad_slots, None, None


def _unstack(slots: Tensor, layout: DocumentBlocks, num_tokens: int) -> Tensor:
    rows = slots.new_zeros(num_tokens, *slots.shape[1:])
    rows[layout.documents] = slots[layout.slots]
    return rows
