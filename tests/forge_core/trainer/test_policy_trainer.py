"""A step: what is averaged over what, what is clipped, what is refused, and what resumes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from forge_core.batching import TrainSequence, pack_sequences
from forge_core.config import OptimizerConfig
from forge_core.losses import LossInputs, LossOutput, cross_entropy, grpo
from forge_core.trainer.checks import NonFiniteError


def test_packed_documents_have_the_logprobs_they_have_alone(open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3)
    packed = pack_sequences(sequences, 32)
    logprobs = trainer.logprobs(packed)
    for index, sequence in enumerate(sequences):
        alone = trainer.logprobs(pack_sequences([sequence], 32))[0, : len(sequence.token_ids)]
        torch.testing.assert_close(logprobs[packed.sequence_ids == index], alone, atol=1e-5, rtol=0)


def test_changing_one_document_leaves_the_others_bit_for_bit(open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3)
    packed = pack_sequences(sequences, 32)
    first = sequences[2]
    changed_ids = (first.token_ids + 1) % 37
    changed = pack_sequences([*sequences[:2], replace(first, token_ids=changed_ids), *sequences[3:]], 32)
    before, after = trainer.logprobs(packed), trainer.logprobs(changed)
    others = packed.sequence_ids != 2
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[packed.sequence_ids == 2], after[packed.sequence_ids == 2])


def test_logprobs_and_entropy_are_those_of_transformers_at_a_temperature(open_trainer, qwen3, transformers_logits):
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    sequence = TrainSequence(ids, torch.arange(8) >= 3, torch.zeros(8))
    batch = pack_sequences([sequence], 16)
    # Tokens 3..7 are predicted at positions 2..6.
    expected = F.log_softmax(transformers_logits(qwen3, ids)[2:7] / 0.7, dim=-1)
    trainer = open_trainer(qwen3, row_tokens=16)
    logprobs = trainer.logprobs(batch, temperature=0.7)
    torch.testing.assert_close(logprobs[0, 2:7], expected.gather(1, ids[3:, None])[:, 0], atol=1e-5, rtol=0)
    assert logprobs[0, [0, 1, 7, 8]].tolist() == [0, 0, 0, 0]
    metrics = trainer.train_step(batch, cross_entropy, temperature=0.7)
    entropy = -(expected.exp() * expected).sum(-1).mean()
    assert metrics["entropy/mean"] == pytest.approx(entropy.item(), abs=1e-5)


def test_loss_and_gradient_norm_equal_plain_autograd_on_transformers(open_trainer, qwen3, sequences):
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for sequence in sequences:
        logprobs = F.log_softmax(model(sequence.token_ids[None]).logits[0, :-1], dim=-1)
        token_logprobs = logprobs.gather(1, sequence.token_ids[1:, None])[:, 0]
        total = total - token_logprobs[sequence.loss_mask[1:]].sum()
        count += int(sequence.loss_mask.sum())
    (total / count).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()

    metrics = open_trainer(qwen3).train_step(pack_sequences(sequences, 32), cross_entropy)
    assert metrics["loss/policy"] == pytest.approx((total / count).item(), abs=1e-5)
    assert metrics["grad_norm/total"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["tokens/trained"] == count
    assert metrics["tokens/total"] == sum(len(sequence.token_ids) for sequence in sequences)


def test_token_mean_of_the_clipped_loss_is_the_golden_number(open_trainer, qwen3):
    """algorithms.md: clip .2/.28, token mean .0048791911, fraction clipped .1379310 (verl, TRL, slime, ...)."""
    generator = torch.Generator().manual_seed(1234)
    old = -torch.rand(8, 5, generator=generator) * 2 - 0.1
    new = old + (torch.rand(8, 5, generator=generator) - 0.5) * 0.8
    lengths = [5, 3, 4, 1, 5, 2, 5, 4]
    advantages = [0.866024, -0.866024, -0.866024, 0.866024, -0.499999, -0.499999, 1.499997, -0.499999]
    golden = [
        TrainSequence(
            token_ids=torch.arange(length + 1),
            loss_mask=torch.arange(length + 1) >= 1,
            generator_logprobs=torch.cat([torch.zeros(1), old[index, :length]]),
            advantage=advantages[index],
        )
        for index, length in enumerate(lengths)
    ]

    def grpo_of_golden_logprobs(inputs: LossInputs) -> LossOutput:
        logprobs = 0 * inputs.logprobs  # keeps the gradient's path, replaces the values
        for index, length in enumerate(lengths):
            at = torch.zeros_like(inputs.mask)
            at[inputs.mask] = inputs.sequence_ids[inputs.mask] == index
            if at.any():
                logprobs = logprobs.masked_scatter(at, new[index, :length] + logprobs[at])
        return grpo(replace(inputs, logprobs=logprobs), clip_high=0.28)

    for rows in (1, 3):
        trainer = open_trainer(qwen3, row_tokens=8, micro_batch_rows=rows)
        metrics = trainer.train_step(pack_sequences(golden, 8), grpo_of_golden_logprobs)
        assert metrics["loss/policy"] == pytest.approx(0.0048791911, abs=1e-6)
        assert metrics["loss/clip_fraction"] == pytest.approx(0.1379310, abs=1e-6)


def test_metrics_do_not_depend_on_micro_batches_or_row_length(open_trainer, qwen3, sequences):
    def two_steps(row_tokens: int, micro_batch_rows: int) -> list[dict[str, float]]:
        trainer = open_trainer(qwen3, row_tokens=row_tokens, micro_batch_rows=micro_batch_rows)
        batch = pack_sequences(sequences, row_tokens)
        return [trainer.train_step(batch, grpo, temperature=0.9) for _ in range(2)]

    expected = two_steps(32, 1)
    for row_tokens, micro_batch_rows in ((32, 2), (32, 8), (64, 1), (20, 3)):
        for step, metrics in enumerate(two_steps(row_tokens, micro_batch_rows)):
            assert metrics == pytest.approx(expected[step], abs=2e-6, rel=1e-5)


def test_on_policy_there_is_no_gap_and_nothing_clipped(open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3)
    logprobs = trainer.logprobs(batch := pack_sequences(sequences, 32))
    metrics = trainer.train_step(replace(batch, generator_logprobs=logprobs), grpo)
    assert metrics["logprob_gap/max"] == 0
    assert metrics["loss/clip_fraction"] == 0
    assert metrics["ratio/mean"] == 1
    # With r = 1 the loss of a token is -A.
    assert metrics["loss/policy"] == pytest.approx(-float(batch.advantages[batch.mask].mean()), abs=1e-6)


def test_gap_to_the_generator_is_reported(open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3)
    batch = pack_sequences(sequences, 32)
    off = trainer.logprobs(batch) + 0.25 * batch.mask
    off[batch.mask.nonzero()[5].tolist()[0], batch.mask.nonzero()[5].tolist()[1]] -= 1.0  # a gap of 0.75 at one token
    metrics = trainer.train_step(replace(batch, generator_logprobs=off), grpo)
    count = int(batch.mask.sum())
    assert metrics["logprob_gap/max"] == pytest.approx(0.75, abs=1e-5)
    assert metrics["logprob_gap/mean"] == pytest.approx((0.25 * (count - 1) + 0.75) / count, abs=1e-5)


@pytest.mark.parametrize("max_grad_norm", [0.01, 1000.0])
def test_the_gradient_the_optimizer_sees_is_clipped(max_grad_norm, open_trainer, qwen3, sequences):
    trainer = open_trainer(qwen3, optimizer=OptimizerConfig(max_grad_norm=max_grad_norm, beta1=0.9))
    metrics = trainer.train_step(pack_sequences(sequences, 32), cross_entropy)
    state = trainer.optimizers.state_dict()
    moments = [value.full_tensor() for name, value in state.items() if name.endswith(".exp_avg")]
    # The first moment after one step is (1 - beta1) times the gradient.
    seen = torch.stack([moment.norm() for moment in moments]).norm().item() / (1 - 0.9)
    assert metrics["grad_norm/total"] > 0.05
    assert seen == pytest.approx(min(max_grad_norm, metrics["grad_norm/total"]), rel=1e-3)
    assert metrics["grad_norm/clipped"] == pytest.approx(seen, rel=1e-3)


def nan_advantage(sequences):
    return [replace(sequences[0], advantage=float("nan")), *sequences[1:]], grpo


def infinite_gradient(sequences):
    # The square root has value 0 and slope infinity at 0.
    return sequences, lambda inputs: LossOutput((inputs.logprobs - inputs.logprobs.detach()).sqrt())


@pytest.mark.parametrize("poison", [nan_advantage, infinite_gradient])
def test_a_step_that_is_not_finite_changes_nothing(poison, open_trainer, qwen3, sequences, exported, digest):
    trainer = open_trainer(qwen3)
    healthy = pack_sequences(sequences, 32)
    poisoned, loss = poison(sequences)
    trainer.train_step(healthy, grpo)
    before, step = digest(exported(trainer, qwen3)), trainer.step
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        trainer.train_step(pack_sequences(poisoned, 32), loss)
    assert (digest(exported(trainer, qwen3)), trainer.step) == (before, step)
    trainer.train_step(healthy, grpo)
    after = digest(exported(trainer, qwen3))

    unpoisoned = open_trainer(qwen3)
    for _ in range(2):
        unpoisoned.train_step(healthy, grpo)
    assert digest(exported(unpoisoned, qwen3)) == after


def test_an_error_in_a_users_loss_leaves_the_trainer_usable(open_trainer, qwen3, sequences, exported, digest):
    trainer = open_trainer(qwen3)
    batch = pack_sequences(sequences, 32)

    def broken(inputs: LossInputs) -> LossOutput:
        raise KeyError("reference_logprobs")

    with pytest.raises(KeyError):
        trainer.train_step(batch, broken)
    trainer.train_step(batch, grpo)
    after = digest(exported(trainer, qwen3))
    trainer = open_trainer(qwen3)
    trainer.train_step(batch, grpo)
    assert digest(exported(trainer, qwen3)) == after


def test_a_batch_without_trained_tokens_has_no_loss_and_no_gradient(open_trainer, qwen3, sequences):
    untrained = [replace(s, loss_mask=torch.zeros_like(s.loss_mask), advantage=float("nan")) for s in sequences]
    metrics = open_trainer(qwen3).train_step(pack_sequences(untrained, 32), grpo)
    assert (metrics["loss/policy"], metrics["grad_norm/total"], metrics["tokens/trained"]) == (0, 0, 0)


def test_a_sequence_longer_than_the_context_is_refused(open_trainer, qwen3):
    long = TrainSequence(torch.zeros(65, dtype=torch.int64), torch.arange(65) >= 1, torch.zeros(65))
    with pytest.raises(ValueError, match=r"65 tokens, more than max_position_embeddings \(64\)"):
        open_trainer(qwen3, row_tokens=128).train_step(pack_sequences([long], 128), cross_entropy)


def test_greedy_temperature_is_refused(open_trainer, qwen3, sequences):
    with pytest.raises(ValueError, match="temperature is 0"):
        open_trainer(qwen3).logprobs(pack_sequences(sequences, 32), temperature=0)


def test_activation_checkpointing_changes_no_number(open_trainer, qwen3, sequences):
    batch = pack_sequences(sequences, 32)
    expected = open_trainer(qwen3).train_step(batch, grpo)
    for policy in ("selective", "full"):
        assert open_trainer(qwen3, activation_checkpoint=policy).train_step(batch, grpo) == expected
