"""torchtitan computes what transformers computes, and reads and writes the same files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from forge_core.batching import TrainSequence, pack_sequences
from forge_core.config import OptimizerConfig
from forge_core.losses import cross_entropy
from forge_core.trainer.models import PolicyShape

KINDS = ["qwen3-tied", "llama-tied", "llama-untied"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_before_and_after_training(
    kind, policy_dirs, open_trainer, sequences, trainer_logits, transformers_logits, tmp_path
):
    source, batch = policy_dirs[kind], pack_sequences(sequences, 32)
    trainer = open_trainer(source, optimizer=OptimizerConfig(learning_rate=1e-2))

    def assert_equal_logits(hf_dir: Path) -> None:
        logits = trainer_logits(trainer, batch)
        for index, sequence in enumerate(sequences):
            expected = transformers_logits(hf_dir, sequence.token_ids)
            torch.testing.assert_close(logits[batch.sequence_ids == index], expected, atol=1e-4, rtol=1e-4)

    assert_equal_logits(source)
    for _ in range(2):
        trainer.train_step(batch, cross_entropy)
    trainer.export_hf(tmp_path / "out", source)
    assert_equal_logits(tmp_path / "out")
    assert_weights_differ(source, tmp_path / "out")


def assert_weights_differ(first: Path, second: Path) -> None:
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()  # a tied lm_head is written, or not, as transformers does
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_export_holds_the_companions_and_nothing_else(open_trainer, qwen3, tmp_path):
    open_trainer(qwen3).export_hf(tmp_path / "out", qwen3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_config_of_an_export_names_the_dtype_of_its_weights(open_trainer, qwen3, tmp_path):
    source = tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.bfloat16).save_pretrained(source)
    assert json.loads((source / "config.json").read_text())["dtype"] == "bfloat16"
    open_trainer(source).export_hf(tmp_path / "out", source)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"
    weights, original = load_file(tmp_path / "out/model.safetensors"), load_file(source / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], original[name].float()) for name in original)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary(make_policy, open_trainer, sequences):
    # A final norm of zeros makes every logit 0, so each of the 37 tokens has probability 1/37.
    trainer = open_trainer(make_policy("qwen3-tied", lambda model: model.model.norm.weight.zero_()))
    metrics = trainer.train_step(pack_sequences(sequences, 32), cross_entropy)
    assert metrics["loss/policy"] == pytest.approx(math.log(37), abs=1e-6)
    assert metrics["entropy/mean"] == pytest.approx(math.log(37), abs=1e-6)


def test_a_model_that_knows_the_next_token_has_no_loss(make_policy, open_trainer):
    def predict_successor(model):
        """Blocks that add nothing, embeddings that tell tokens apart, and an output that names token + 1."""
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embeddings = torch.nn.functional.normalize(torch.randn(37, 32))
        model.model.embed_tokens.weight.copy_(embeddings)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(100 * embeddings.roll(1, dims=0))

    trainer = open_trainer(make_policy("llama-untied", predict_successor))
    ids = torch.arange(5, 15)
    sequence = TrainSequence(ids, torch.arange(10) >= 1, torch.zeros(10))
    assert trainer.train_step(pack_sequences([sequence], 32), cross_entropy)["loss/policy"] == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("missing", lambda weights: weights.pop("model.norm.weight"), r"missing \['model.norm.weight'\]"),
        ("renamed", lambda weights: weights.update(extra=weights.pop("model.norm.weight")), r"unknown \['extra'\]"),
        (
            "reshaped",
            lambda weights: weights.update({"model.norm.weight": torch.ones(16)}),
            r"is \(16,\).*makes it \(32,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    name, change, message, open_trainer, qwen3, tmp_path, exported
):
    broken = shutil.copytree(qwen3, tmp_path / "broken")
    weights = {key: tensor + 1 for key, tensor in load_file(broken / "model.safetensors").items()}
    change(weights)
    save_file(weights, broken / "model.safetensors")
    trainer = open_trainer(qwen3)
    before = exported(trainer, qwen3)
    with pytest.raises(ValueError, match=message):
        trainer.load_policy(broken)
    after = exported(trainer, qwen3)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_policy_of_another_shape_is_refused(open_trainer, qwen3, make_policy, tmp_path):
    other = shutil.copytree(qwen3, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match=r"norm_eps=1e-05.*open a trainer on it"):
        open_trainer(qwen3).load_policy(other)


def test_new_weights_are_used_at_once_even_after_a_pass_without_gradient(
    open_trainer, qwen3, make_policy, sequences, policy_dirs
):
    batch = pack_sequences(sequences, 32)
    other = make_policy("qwen3-tied", lambda model: model.model.embed_tokens.weight.mul_(1.5))
    expected = open_trainer(other).logprobs(batch)
    trainer = open_trainer(qwen3)
    assert not torch.allclose(trainer.logprobs(batch), expected)
    trainer.load_policy(other)
    assert torch.equal(trainer.logprobs(batch), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type in config.json is 'gpt2'; the trainer knows llama and qwen3"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type in config.json is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": None}, "rope_type .* is 'linear'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor .* is 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window in config.json is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types in config.json"),
        ({"attention_bias": True}, "attention_bias in config.json is True"),
        ({"hidden_act": "gelu"}, "hidden_act in config.json is 'gelu'; the trainer reproduces 'silu' only"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config in config.json"),
        ({"hidden_size": None}, "hidden_size in config.json is None; it must be a positive integer"),
    ],
)
def test_an_architecture_we_cannot_reproduce_is_refused_by_name(change, message, qwen3, tmp_path):
    config = json.loads((qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        PolicyShape.read(tmp_path)


def test_a_window_that_is_switched_off_is_no_window(qwen3, tmp_path):
    config = json.loads((qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 4096, "use_sliding_window": False}))
    assert PolicyShape.read(tmp_path) == PolicyShape.read(qwen3)


def test_rotary_settings_are_read_from_the_older_layout_too(tmp_path, policy_dirs):
    config = json.loads((policy_dirs["llama-tied"] / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert PolicyShape.read(tmp_path) == PolicyShape.read(policy_dirs["llama-tied"])
