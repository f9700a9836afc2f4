"""The same trainer on a GPU: kernels, precision, packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from forge_core.batching import pack_sequences
from forge_core.losses import cross_entropy, grpo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Kernel and precision; varlen computes in bfloat16 alone.
SETTINGS = [
    {"attention": "varlen", "dtype": "bfloat16"},
    {"attention": "flex", "dtype": "bfloat16"},
    {"attention": "flex", "dtype": "float32"},
]


def document_logprobs(hf_dir, dtype: torch.dtype, sequences) -> torch.Tensor:
    """transformers' log-probabilities of all trained tokens, document by document."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype).cuda().eval()
    pieces = []
    with torch.no_grad():
        for sequence in sequences:
            ids = sequence.token_ids.cuda()
            logprobs = F.log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
            pieces.append(logprobs.gather(1, ids[1:, None])[:, 0].cpu()[sequence.loss_mask[1:]])
    return torch.cat(pieces)


@pytest.mark.parametrize("settings", SETTINGS)
def test_logprobs_are_as_close_to_transformers_as_its_own_rounding(settings, open_trainer, qwen3, sequences):
    batch = pack_sequences(sequences, 128)
    logprobs = open_trainer(qwen3, row_tokens=128, **settings).logprobs(batch)
    ours = torch.cat([logprobs[(batch.sequence_ids == index) & batch.mask] for index in range(len(sequences))])
    exact = document_logprobs(qwen3, torch.float32, sequences)
    rounded = document_logprobs(qwen3, getattr(torch, settings["dtype"]), sequences)
    allowed = max(1e-3, 2 * float((rounded - exact).abs().mean()))
    assert float((ours - exact).abs().mean()) < allowed


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_document_does_not_see_its_neighbours(settings, open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3, row_tokens=128, **settings)
    packed = pack_sequences(sequences, 128)
    changed_ids = (sequences[2].token_ids + 1) % 37
    changed = pack_sequences([*sequences[:2], replace(sequences[2], token_ids=changed_ids), *sequences[3:]], 128)
    others = packed.sequence_ids != 2
    assert torch.equal(trainer.logprobs(packed)[others], trainer.logprobs(changed)[others])


@pytest.mark.parametrize("settings", SETTINGS)
def test_steps_lower_the_loss_and_keep_float32_weights(settings, open_trainer, qwen3, sequences, exported):
    batch = pack_sequences(sequences, 128)
    trainer = open_trainer(qwen3, row_tokens=128, **settings)
    losses = [trainer.train_step(batch, cross_entropy)["loss/policy"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert trainer.train_step(batch, grpo)["grad_norm/total"] > 0
    assert {tensor.dtype for tensor in exported(trainer, qwen3).values()} == {torch.float32}


def test_varlen_in_float32_is_refused(open_trainer, qwen3):
    with pytest.raises(ValueError, match="varlen kernels compute in bfloat16"):
        open_trainer(qwen3, attention="varlen", dtype="float32")


def test_train_state_survives_on_the_gpu(open_trainer, qwen3, sequences, exported, digest, tmp_path):
    batch = pack_sequences(sequences, 128)
    trainer = open_trainer(qwen3, row_tokens=128)
    trainer.train_step(batch, grpo)
    trainer.save_train_state(tmp_path / "state")
    before = digest(exported(trainer, qwen3))
    trainer = open_trainer(qwen3, row_tokens=128)
    trainer.load_train_state(tmp_path / "state")
    assert digest(exported(trainer, qwen3)) == before
