"""Loss and gradient of a batch do not depend on how it is cut up; what each aggregation divides by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge_core.batching import TrainSequence, pack_sequences
from forge_core.losses import LossOutput, dapo, grpo, gspo, reinforce, sapo
from forge_core.trainer.objective import objective
from forge_core.trainer.token_sums import TokenSums
from forge_core.update_config import KlConfig

AGGREGATIONS = ["token_mean", "sequence_mean", "fixed_horizon"]
HORIZON = 12


def documents(lengths: list[int], advantages: list[float] | None = None) -> list[TrainSequence]:
    """Completions of these lengths after a prompt of one token; log-probs and advantages from a fixed seed."""
    generator = torch.Generator().manual_seed(sum(lengths))
    found = []
    for index, length in enumerate(lengths):
        mask = torch.arange(length + 1) >= 1
        logprobs = torch.where(mask, -0.5 - torch.rand(length + 1, generator=generator), 0.0)
        advantage = float(torch.randn((), generator=generator)) if advantages is None else advantages[index]
        reference = logprobs + 0.4 * torch.rand(length + 1, generator=generator)
        found.append(TrainSequence(torch.arange(length + 1), mask, logprobs, advantage, reference))
    return found


def policy(sequences: list[TrainSequence]) -> Tensor:
    """Log-probs [S, T] of a policy that has moved away from the generator, by sequence and token."""
    generator = torch.Generator().manual_seed(5)
    table = torch.zeros(len(sequences), 1 + max(len(sequence.token_ids) for sequence in sequences)).double()
    for index, sequence in enumerate(sequences):
        table[index, : len(sequence.token_ids)] = sequence.generator_logprobs
    return (table + 0.6 * (torch.rand(table.shape, generator=generator) - 0.5)).requires_grad_()


def loss_and_gradient(
    sequences: list[TrainSequence],
    loss,
    aggregation,
    *,
    row_tokens: int = 64,
    micro_batch_rows: int = 1,
    num_ranks: int = 1,
    order: list[int] | None = None,
    kl: KlConfig | None = None,
    entropy_coefficient: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Of the policy above, over the micro-batches of all ranks; the square of a log-prob stands for the entropy."""
    order = order or list(range(len(sequences)))
    table = policy(sequences)
    batch = pack_sequences(
        [sequences[index] for index in order], row_tokens, aggregation=aggregation, max_tokens=HORIZON
    )
    total, sums = torch.zeros(()).double(), TokenSums(int(batch.mask.sum()))
    for rank in range(num_ranks):
        for piece in batch.for_rank(rank, num_ranks).micro_batches(micro_batch_rows):
            at = torch.tensor(order)[piece.sequence_ids[piece.mask]], piece.positions[piece.mask] + 1
            entropies = table[at].square()
            total = total + objective(
                loss, piece, table[at], entropies, kl=kl, entropy_coefficient=entropy_coefficient, sums=sums
            )
    total.backward()
    assert table.grad is not None
    return total.detach(), table.grad


@settings(deadline=None, max_examples=40)
@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradient_are_the_same_however_the_batch_is_cut_up(aggregation, data, lengths: list[int]):
    sequences = documents(lengths)
    loss = data.draw(st.sampled_from([grpo, dapo, gspo, sapo]))
    kl = KlConfig(coefficient=0.2, estimator=data.draw(st.sampled_from(["k2", "k3", "k3_ratio"])))
    expected = loss_and_gradient(sequences, loss, aggregation, kl=kl)
    found = loss_and_gradient(
        sequences,
        loss,
        aggregation,
        row_tokens=data.draw(st.integers(10, 40), label="row_tokens"),
        micro_batch_rows=data.draw(st.integers(1, 8), label="micro_batch_rows"),
        num_ranks=data.draw(st.integers(1, 3), label="num_ranks"),
        order=data.draw(st.permutations(range(len(lengths))), label="order"),
        kl=kl,
    )
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_of_8_4_and_1_documents_give_one_gradient(aggregation):
    sequences = documents([5, 3, 4, 1, 5, 2, 5, 4])
    whole = loss_and_gradient(sequences, grpo, aggregation, row_tokens=64)
    for row_tokens in (24, 12, 6):
        found = loss_and_gradient(sequences, grpo, aggregation, row_tokens=row_tokens)
        torch.testing.assert_close(found, whole, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_that_holds_everything_twice_has_the_same_loss(aggregation):
    lengths, advantages = [5, 3, 4, 1], [1.0, -0.5, 0.25, -0.75]
    once = documents(lengths, advantages)
    flat = lambda inputs: LossOutput(inputs.generator_logprobs * inputs.advantages + 0 * inputs.logprobs)  # noqa: E731
    loss, _ = loss_and_gradient(once, flat, aggregation, entropy_coefficient=0)
    twice, _ = loss_and_gradient(once + once, flat, aggregation, entropy_coefficient=0)
    assert twice.item() == pytest.approx(loss.item(), abs=1e-7)


def test_what_a_token_of_a_short_and_of_a_long_completion_counts():
    # Lengths 2 and 8, advantages 1 and -1, on policy with ratio 1: the gradient of a token is -A times its weight.
    def gradients(aggregation) -> list[float]:
        _, gradient = loss_and_gradient(documents([2, 8], [1.0, -1.0]), reinforce, aggregation, entropy_coefficient=0)
        assert (gradient[0, 1:3] == gradient[0, 1]).all()
        assert (gradient[1, 1:9] == gradient[1, 1]).all()
        return [gradient[0, 1].item(), gradient[1, 1].item()]

    assert gradients("token_mean") == pytest.approx([-1 / 10, 1 / 10])
    assert gradients("sequence_mean") == pytest.approx([-1 / 4, 1 / 16])  # 1 / (2 sequences * 2), 1 / (2 * 8)
    assert gradients("fixed_horizon") == pytest.approx([-1 / 24, 1 / 24])  # 1 / (2 sequences * 12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sequence_without_trained_tokens_counts_for_nothing(aggregation):
    sequences = documents([3, 4])
    nothing = torch.zeros(1)
    empty = TrainSequence(nothing.long(), torch.tensor([False]), nothing, advantage=9.0, reference_logprobs=nothing)
    loss, _ = loss_and_gradient(sequences, grpo, aggregation)
    assert loss_and_gradient([*sequences, empty], grpo, aggregation)[0].item() == pytest.approx(loss.item())


def test_a_horizon_shorter_than_a_completion_is_refused():
    for max_tokens in (None, 4):
        with pytest.raises(ValueError, match=f"fixed_horizon divides by max_tokens, which is {max_tokens}; it must be"):
            pack_sequences(documents([5, 3]), 16, aggregation="fixed_horizon", max_tokens=max_tokens)


def test_a_correction_multiplies_the_policy_loss_and_not_the_entropy():
    batch = pack_sequences(documents([3, 4]), 16)
    corrections = torch.where(batch.sequence_ids == 0, 2.0, 0.5)
    logprobs, entropies = torch.full((7,), -1.0), torch.linspace(0, 1, 7)

    def value(batch, coefficient: float) -> float:
        sums = TokenSums(7)
        return objective(reinforce, batch, logprobs, entropies, entropy_coefficient=coefficient, sums=sums).item()

    # -A lp = A; the longer document is packed first, both have weight 1/7 per token.
    a, b = (float(batch.advantages[(batch.sequence_ids == index) & batch.mask][0]) for index in (0, 1))
    corrected = replace(batch, corrections=corrections)
    assert value(corrected, 0.0) == pytest.approx((2 * 3 * a + 0.5 * 4 * b) / 7, abs=1e-6)
    assert value(corrected, 0.1) - value(corrected, 0.0) == pytest.approx(-0.1 * 0.5, abs=1e-6)


def test_the_effective_sample_size_counts_tokens():
    # One token of four with weight 3, the others 1: 6^2 / (4 * 12) = 3/4.
    sums = TokenSums(4)
    sums.add_ratio("ratio", torch.tensor([3.0, 1.0]))
    sums.add_ratio("ratio", torch.tensor([1.0, 1.0]))
    mean, square = sums.sums["ratio/mean"].item(), sums.squares["ratio"].item()
    assert (mean, square, sums.maxima["ratio/max"].item()) == (1.5, 3.0, 3.0)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
def test_a_kl_term_adds_its_plain_formula_in_value_and_gradient(estimator):
    sequences, kl = documents([3, 5, 1]), KlConfig(coefficient=0.7, estimator=estimator)
    without, gradient_without = loss_and_gradient(sequences, grpo, "sequence_mean")
    found, gradient = loss_and_gradient(sequences, grpo, "sequence_mean", kl=kl)

    table, expected = policy(sequences), torch.zeros(()).double()
    for index, sequence in enumerate(sequences):
        assert sequence.reference_logprobs is not None
        for place in range(1, len(sequence.token_ids)):
            lp = table[index, place]
            d = lp - sequence.reference_logprobs[place].double()
            k3 = torch.exp(-d) + d - 1
            ratio = torch.exp(lp - sequence.generator_logprobs[place].double())
            term = {"k2": d**2 / 2, "k3": k3, "k3_ratio": ratio * k3}[estimator]
            expected = expected + 0.7 * term / (len(sequence.token_ids) - 1) / len(sequences)
    (expected_gradient,) = torch.autograd.grad(expected, table)
    assert (found - without).item() == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient - gradient_without, expected_gradient, atol=1e-6, rtol=1e-5)


def test_a_kl_term_that_only_measures_or_lowers_rewards_changes_no_loss():
    sequences = documents([3, 5, 1])
    expected = loss_and_gradient(sequences, grpo, "token_mean")
    for kl in (KlConfig(coefficient=0), KlConfig(coefficient=0.5, place="reward")):
        torch.testing.assert_close(loss_and_gradient(sequences, grpo, "token_mean", kl=kl), expected, atol=0, rtol=0)


def test_a_reference_policy_that_never_says_a_token_gives_a_finite_loss_and_is_counted():
    [sequence] = documents([2], [1.0])
    assert sequence.reference_logprobs is not None
    sequence.reference_logprobs[1] = -200.0
    batch, sums = pack_sequences([sequence], 8), TokenSums(2)
    logprobs = torch.full((2,), -0.1, requires_grad=True)
    kl = KlConfig(coefficient=0.1, estimator="k3")
    loss = objective(reinforce, batch, logprobs, torch.zeros(2), kl=kl, entropy_coefficient=0, sums=sums)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert sums.sums["kl/reference_clamped"].item() == 0.5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_completions_that_count_without_a_forward_pass_weigh_as_if_they_had_had_one(aggregation):
    sequences = documents([3, 5, 4, 2], [1.0, -0.5, 0.0, 0.0])
    whole = pack_sequences(sequences, 16, aggregation=aggregation, max_tokens=HORIZON)
    spared = pack_sequences(sequences[:2], 16, aggregation=aggregation, max_tokens=HORIZON, idle_lengths=[4, 2])
    for index in (0, 1):
        weights = [batch.weights[(batch.sequence_ids == index) & batch.mask] for batch in (whole, spared)]
        torch.testing.assert_close(weights[0], weights[1], atol=0, rtol=0)
