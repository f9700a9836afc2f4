"""Log-probabilities in chunks against the plain formula, and what they hold in memory."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.trainer import logprob_head
from forge_core.trainer.logprob_head import TokenLogprobs


def plain(hidden, weight, labels, temperature):
    scores = (hidden @ weight.T).float() / temperature
    logprobs = F.log_softmax(scores, dim=-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def inputs(num_tokens: int, vocab_size: int, width: int):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, width, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return hidden, weight, labels, torch.randn(num_tokens, generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_plain_formula(chunk_tokens, temperature, monkeypatch):
    monkeypatch.setattr(logprob_head, "CHUNK_ELEMENTS", chunk_tokens * 11)
    hidden, weight, labels, upstream = inputs(20, 11, 8)
    expected = plain(hidden, weight, labels, temperature)
    expected_gradients = torch.autograd.grad(expected[0] @ upstream, (hidden, weight))
    logprobs, entropies = TokenLogprobs.apply(hidden, weight, labels, temperature)
    gradients = torch.autograd.grad(logprobs @ upstream, (hidden, weight))
    torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [2, 64])
def test_gradients_of_log_probs_and_entropies_pass_gradcheck(chunk_tokens, monkeypatch):
    monkeypatch.setattr(logprob_head, "CHUNK_ELEMENTS", chunk_tokens * 7)
    hidden, weight, labels, _ = inputs(5, 7, 3)
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))

    def head(hidden, weight):
        return TokenLogprobs.apply(hidden, weight, labels, 0.7)

    assert torch.autograd.gradcheck(head, (hidden, weight))
    assert torch.autograd.gradcheck(lambda *tensors: head(*tensors)[1], (hidden, weight))


def test_the_gradient_of_the_entropy_equals_the_plain_formula():
    hidden, weight, labels, upstream = inputs(20, 11, 8)
    _, expected = plain(hidden, weight, labels, 0.6)
    _, entropies = TokenLogprobs.apply(hidden, weight, labels, 0.6)
    gradients = [torch.autograd.grad(value @ upstream, (hidden, weight)) for value in (entropies, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)


def test_the_log_probs_alone_cost_what_they_did_before_the_entropy_had_a_gradient(monkeypatch):
    """One chunk: a softmax of the whole chunk is held once more only where the entropy is part of the loss."""
    hidden, weight, labels, upstream = inputs(100, 1000, 4)

    def peak(with_entropy: bool) -> int:
        logprobs, entropies = TokenLogprobs.apply(hidden, weight, labels, 1.0)
        loss = logprobs @ upstream + (entropies.sum() if with_entropy else 0.0)
        with PeakMemory() as memory:
            torch.autograd.grad(loss, (hidden, weight))
        return memory.peak

    chunk_bytes = 4 * 100 * 1000
    assert peak(False) < 2.5 * chunk_bytes
    assert peak(True) >= peak(False) + 0.9 * chunk_bytes


def test_no_token_at_all_has_an_empty_result_and_a_zero_gradient():
    hidden, weight, labels, _ = inputs(0, 11, 8)
    logprobs, entropies = TokenLogprobs.apply(hidden, weight, labels, 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert not weight.grad.any()


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.alive:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_peak_memory_is_a_third_of_materialising_the_logits(monkeypatch):
    # A tenth of 1,000 tokens x 150,000 words, with chunks a tenth as large.
    monkeypatch.setattr(logprob_head, "CHUNK_ELEMENTS", logprob_head.CHUNK_ELEMENTS // 10)

    def peak(logprobs_of) -> int:
        hidden, weight, labels, upstream = inputs(1000, 15_000, 4)
        with PeakMemory() as memory:
            torch.autograd.grad(logprobs_of(hidden, weight, labels, 1.0)[0] @ upstream, (hidden, weight))
        return memory.peak

    assert peak(TokenLogprobs.apply) <= 0.35 * peak(plain)
