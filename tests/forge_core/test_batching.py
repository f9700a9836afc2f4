"""Packing documents into rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_core.batching import TrainSequence, pack_sequences


def sequence(length: int, *, first_token: int = 0, prompt: int = 1, advantage: float = 1.0) -> TrainSequence:
    """Tokens first_token, first_token + 1, ...; everything after the prompt is trained, at log-probability -token."""
    ids = torch.arange(first_token, first_token + length)
    mask = torch.arange(length) >= prompt
    return TrainSequence(ids, mask, torch.where(mask, -ids.float(), 0.0), advantage)


def test_a_position_predicts_the_next_token_of_its_document():
    a, b = sequence(3, first_token=10, prompt=2, advantage=0.5), sequence(2, first_token=20, advantage=-1.0)
    batch = pack_sequences([a, b], 8)
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 0, 0, 0]]
    assert batch.labels.tolist() == [[11, 12, 0, 21, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert batch.mask.tolist() == [[False, True, False, True, False, False, False, False]]
    assert batch.generator_logprobs.tolist() == [[0, -12, 0, -21, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0.5, 0, -1, 0, 0, 0, 0]]


def test_longest_documents_are_placed_first_and_each_in_the_first_row_with_room():
    # 5 | 4 + 2 | 4 + 1: sorted 5 4 4 2 1; the 2 does not fit after the 5 (1 token left), the 1 does.
    batch = pack_sequences([sequence(n) for n in (1, 4, 2, 5, 4)], 6)
    assert [sorted(set(row.tolist()) - {-1}) for row in batch.sequence_ids] == [[0, 3], [1, 2], [4]]


def test_equal_lengths_keep_their_order():
    batch = pack_sequences([sequence(2) for _ in range(4)], 4)
    assert batch.sequence_ids.tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_values_outside_the_loss_mask_never_reach_the_batch():
    ids, mask = torch.tensor([1, 2, 3]), torch.tensor([False, False, True])
    poisoned = TrainSequence(ids, mask, torch.tensor([float("nan"), float("nan"), -1.0]), advantage=2.0)
    batch = pack_sequences([poisoned], 4)
    assert batch.generator_logprobs.tolist() == [[0, -1, 0, 0]]
    assert batch.advantages.tolist() == [[0, 2, 0, 0]]


def test_an_empty_completion_trains_nothing():
    batch = pack_sequences([sequence(3, prompt=3)], 4)
    assert not batch.mask.any()


def test_a_document_longer_than_a_row_is_an_error_with_the_remedy():
    with pytest.raises(ValueError, match=r"sequences\[1\] has 9 tokens.*row_tokens \(8\); raise row_tokens"):
        pack_sequences([sequence(3), sequence(9)], 8)


def test_training_the_first_token_is_an_error():
    with pytest.raises(ValueError, match=r"sequences\[0\]\.loss_mask\[0\] is True"):
        pack_sequences([sequence(3, prompt=0)], 8)


def test_tensors_of_different_length_are_an_error():
    broken = TrainSequence(torch.arange(3), torch.zeros(3, dtype=torch.bool), torch.zeros(2))
    with pytest.raises(ValueError, match=r"3 token_ids, 3 loss_mask and 2 generator_logprobs"):
        pack_sequences([broken], 8)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_every_document_lies_whole_in_one_row(lengths: list[int]):
    documents = [sequence(length, first_token=100 * index) for index, length in enumerate(lengths)]
    batch = pack_sequences(documents, 10)
    for index, document in enumerate(documents):
        at = batch.sequence_ids == index
        assert torch.equal(batch.tokens[at], document.token_ids)
        assert batch.positions[at].tolist() == list(range(len(document.token_ids)))
        assert at.any(dim=1).sum() == 1
    # First-fit leaves at most one row half empty.
    used = (batch.sequence_ids >= 0).sum(dim=1)
    assert (used <= 5).sum() <= 1


def test_ranks_get_every_row_once_and_equally_many():
    batch = pack_sequences([sequence(4, first_token=10 * n) for n in range(5)], 4)
    ranks = [batch.for_rank(rank, 3) for rank in range(3)]
    assert [rank.num_rows for rank in ranks] == [2, 2, 2]
    assert [rank.tokens[:, 0].tolist() for rank in ranks] == [[0, 30], [10, 40], [20, 0]]
    assert [rank.mask.any(dim=1).tolist() for rank in ranks] == [[True, True], [True, True], [True, False]]
    assert ranks[2].sequence_ids[1].tolist() == [-1] * 4


def test_micro_batches_cover_the_batch_in_order():
    batch = pack_sequences([sequence(4) for _ in range(5)], 4)
    assert [piece.sequence_ids[:, 0].tolist() for piece in batch.micro_batches(2)] == [[0, 1], [2, 3], [4]]


def test_more_ranks_than_rows_get_empty_rows():
    batch = pack_sequences([sequence(4)], 4)
    ranks = [batch.for_rank(rank, 4) for rank in range(4)]
    assert [rank.num_rows for rank in ranks] == [1, 1, 1, 1]
    assert [bool(rank.mask.any()) for rank in ranks] == [True, False, False, False]


def test_what_a_batch_may_lack_is_padded_like_the_rest():
    batch = pack_sequences([sequence(4)], 4)
    assert batch.for_rank(1, 2).proximal_logprobs is None
    whole = replace(batch, proximal_logprobs=batch.generator_logprobs, corrections=batch.mask.float())
    assert whole.for_rank(0, 2).proximal_logprobs.tolist() == batch.generator_logprobs.tolist()
    assert whole.for_rank(1, 2).corrections.tolist() == [[0, 0, 0, 0]]
