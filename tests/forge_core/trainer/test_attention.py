"""Documents stacked in padded blocks attend exactly as they do one by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from forge_core.batching import TrainSequence, pack_sequences
from forge_core.trainer.attention import DocumentAttention, find_documents


def pack(lengths: list[int], row_tokens: int):
    documents = [TrainSequence(torch.zeros(n, dtype=torch.int64), torch.arange(n) > 0, torch.zeros(n)) for n in lengths]
    return pack_sequences(documents, row_tokens)


def test_documents_of_similar_length_share_a_block():
    batch = pack([8, 7, 3, 3], 16)  # row 0: 8 7, row 1: 3 3; 7 > 0.75 * 8, 3 is not
    layout = find_documents(batch.positions, batch.sequence_ids)
    assert [block.shape for block in layout.blocks] == [(2, 8), (2, 3)]
    assert layout.blocks[0][1].tolist() == [8, 9, 10, 11, 12, 13, 14, 8]  # padded with its first token
    assert sorted(layout.documents.tolist()) == [*range(15), *range(16, 22)]


def test_blocks_equal_one_document_at_a_time_in_value_and_gradient():
    batch = pack([13, 9, 9, 8, 4, 2, 1, 1, 6], 16)
    shape = batch.tokens.shape
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(*shape, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)
    )
    upstream = torch.randn(*shape, 4, 8, generator=generator)
    expected = torch.zeros(*shape, 4, 8)
    for index in range(9):
        at = batch.sequence_ids == index
        q, k, v = (tensor[at].transpose(0, 1)[None] for tensor in (queries, keys, values))  # [1, N, T, H]
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        expected = expected.masked_scatter(at[..., None, None], output[0].transpose(0, 1))
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), (queries, keys, values))

    layout = find_documents(batch.positions, batch.sequence_ids)
    attention = DocumentAttention.Config().build()
    output = attention(queries, keys, values, attention_masks=layout, enable_gqa=True)
    gradients = torch.autograd.grad((output * upstream).sum(), (queries, keys, values))
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=0)
    assert not output[batch.sequence_ids < 0].any()


def test_rows_of_padding_alone_attend_to_nothing_and_have_a_gradient_of_zero():
    batch = pack([4], 8).for_rank(1, 2)
    layout = find_documents(batch.positions, batch.sequence_ids)
    queries, keys, values = (torch.randn(1, 8, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    output = DocumentAttention.Config().build()(queries, keys, values, attention_masks=layout, enable_gqa=True)
    output.sum().backward()
    assert not output.any()
    for tensor in (queries, keys, values):
        assert tensor.grad is not None  # a rank without one would leave the others waiting for it
        assert not tensor.grad.any()
