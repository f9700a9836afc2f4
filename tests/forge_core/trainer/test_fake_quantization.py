"""Training with quantized numbers: the forward pass is that of the quantized policy, the gradient passes it by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_core.batching import TrainSequence, pack_sequences
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.losses import cross_entropy
from forge_core.quantization.layers import QuantizedLayer, install, linear_layers
from forge_core.quantization.schemes import quantize_weight
from forge_core.quantize_config import QuantizeConfig, SchemeConfig
from forge_core.trainer.fake_quantization import fake_quantized, straight_through
from forge_core.trainer.policy_trainer import PolicyTrainer
from tests.forge_core.trainer.conftest import VOCAB_SIZE, write_policy

CONFIG = QuantizeConfig(scheme=SchemeConfig(name="w8a8_dynamic"), keep=("lm_head", "model.layers.1.mlp.down_proj"))
HARD = QuantizeConfig(scheme=SchemeConfig(name="w4a16", weights_per="channel"))


def sequence(seed: int) -> TrainSequence:
    ids = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(seed))
    return TrainSequence(ids, torch.arange(12) > 0, torch.zeros(12))


def test_the_gradient_of_rounded_numbers_is_that_of_the_exact_ones():
    exact = torch.tensor([0.3, 1.7], requires_grad=True)
    out = straight_through(exact, exact.round())
    assert out.tolist() == [0, 2]
    (out * torch.tensor([2.0, 3.0])).sum().backward()
    assert exact.grad is not None
    assert exact.grad.tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied"])
def test_the_trainer_computes_what_the_quantized_policy_computes_and_training_lowers_its_loss(
    kind: str, tmp_path: Path
):
    directory = write_policy(kind, tmp_path / "policy")
    trainer = PolicyTrainer.open(
        directory,
        trainer=TrainerConfig(row_tokens=48),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        total_steps=100,
        seed=0,
        scratch=tmp_path / "scratch",
    )
    try:
        sequences = [sequence(seed) for seed in range(4)]
        batch = pack_sequences(sequences, 48)
        exact = trainer.logprobs(batch)[batch.mask]
        with fake_quantized(trainer.model, trainer.adapter, CONFIG) as names:
            rounded = trainer.logprobs(batch)[batch.mask]
        assert len(names) == 13
        assert torch.equal(trainer.logprobs(batch)[batch.mask], exact)

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        linears = linear_layers(model)
        weights = {name: quantize_weight(linears[name].weight, CONFIG.scheme) for name in names}
        install(model, {name: QuantizedLayer(CONFIG.scheme, weight, None) for name, weight in weights.items()})
        ids = torch.stack([one.token_ids for one in sequences])
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten()
        torch.testing.assert_close(rounded.sort().values, logprobs.detach().sort().values, atol=2e-3, rtol=1e-3)
        assert (rounded - exact).abs().max() > 1e-3

        with fake_quantized(trainer.model, trainer.adapter, HARD):
            losses = [trainer.train_step(batch, cross_entropy)["loss/policy"] for _ in range(20)]
        assert losses[-1] < 0.8 * losses[0]
    finally:
        trainer.close()
