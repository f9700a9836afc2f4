"""Low-rank adapters: what trains, what stays, and what is published."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from forge_core.batching import pack_sequences
from forge_core.losses import cross_entropy
from forge_core.trainer.lora import ADAPTER_DIRECTORY
from forge_core.trainer.weights import is_adapter
from forge_core.trainer_config import LoraConfig, OptimizerConfig

LORA = LoraConfig(rank=3, alpha=6.0)
FAST = OptimizerConfig(learning_rate=3e-2)
KINDS = ("qwen3-tied", "llama-tied", "llama-untied")


@pytest.fixture
def batch(sequences):
    return pack_sequences(sequences, 32)


def snapshot(trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def trained(open_trainer, policy_dir, batch, num_steps=3):
    trainer = open_trainer(policy_dir, optimizer=FAST, lora=LORA)
    for _ in range(num_steps):
        trainer.train_step(batch, cross_entropy)
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_and_the_weights_beside_them_stay(policy_dirs, open_trainer, batch, kind):
    trainer = open_trainer(policy_dirs[kind], optimizer=FAST, lora=LORA)
    before = snapshot(trainer)
    losses = [trainer.train_step(batch, cross_entropy)["loss/policy"] for _ in range(6)]
    after = snapshot(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if is_adapter(name)}
    assert len(moved) == 2 * 2 * len(LORA.target_modules)  # A and B of every target in two layers
    assert losses[-1] < losses[0]


def test_fresh_adapters_change_nothing(qwen3, open_trainer, trainer_logits, batch):
    plain = trainer_logits(open_trainer(qwen3), batch)
    assert torch.equal(trainer_logits(open_trainer(qwen3, lora=LORA), batch), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_policy_computes_in_transformers_what_the_trainer_computes(
    policy_dirs, open_trainer, trainer_logits, transformers_logits, sequences, batch, tmp_path, kind
):
    trainer = trained(open_trainer, policy_dirs[kind], batch)
    trainer.export_hf(tmp_path / "out", policy_dirs[kind])
    longest = max(sequences, key=lambda sequence: len(sequence.token_ids))
    alone = pack_sequences([longest], 32)
    ours = trainer_logits(trainer, alone)[0, : len(longest.token_ids)]
    theirs = transformers_logits(tmp_path / "out", longest.token_ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (theirs - transformers_logits(policy_dirs[kind], longest.token_ids)).abs().max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_in_the_layout_of_peft_makes_the_merged_weights_of_the_old_ones(
    policy_dirs, open_trainer, batch, tmp_path, kind
):
    trained(open_trainer, policy_dirs[kind], batch).export_hf(tmp_path, policy_dirs[kind])
    old, merged = load_file(policy_dirs[kind] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    adapter = load_file(tmp_path / ADAPTER_DIRECTORY / "adapter_model.safetensors")
    config = json.loads((tmp_path / ADAPTER_DIRECTORY / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    targets = [name for name in old if name.split(".")[-2] in config["target_modules"]]
    assert len(adapter) == 2 * len(targets)
    for name in old:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        delta = 0.0
        if name in targets:
            delta = scale * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            assert delta.abs().max() > 1e-3
        torch.testing.assert_close(merged[name], old[name] + delta, atol=1e-6, rtol=1e-6)


def test_trainer_goes_on_from_published_adapters_to_the_same_bits(
    policy_dirs, open_trainer, exported, digest, batch, tmp_path
):
    source = policy_dirs["llama-tied"]
    trainer = trained(open_trainer, source, batch)
    trainer.export_hf(tmp_path / "out", source)
    expected = digest(exported(trainer, source))
    other = open_trainer(source, lora=LORA)
    assert digest(exported(other, source)) != expected
    other.load_trained(tmp_path / "out")
    assert digest(exported(other, source)) == expected


def test_only_the_chosen_projections_have_adapters(qwen3, open_trainer):
    trainer = open_trainer(qwen3, lora=LoraConfig(rank=2, target_modules=("q_proj", "down_proj")))
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in snapshot(trainer) if is_adapter(name)}
    assert names == {"wq", "w2"}


def test_keys_without_values_are_refused():
    with pytest.raises(ValueError, match="name both or neither"):
        LoraConfig(target_modules=("q_proj", "v_proj"))


def test_loading_a_policy_starts_its_adapters_over(qwen3, open_trainer, exported, digest, batch):
    trainer = open_trainer(qwen3, lora=LORA)
    before = snapshot(trainer)
    trainer.train_step(batch, cross_entropy)
    trainer.load_policy(qwen3)
    assert all(torch.equal(before[name], tensor) for name, tensor in snapshot(trainer).items())
