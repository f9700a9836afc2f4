"""Exported policies are the ones in memory, for transformers and for vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forge_core.quantization.export import export_policy
from forge_core.quantization.layers import install, linear_layers
from forge_core.quantization.post_training import QuantizedModel, quantize_model
from forge_core.quantize_config import CalibrationConfig, QuantizeConfig, SchemeConfig
from tests.forge_core.quantization.conftest import load

SETTINGS = CalibrationConfig(num_samples=32, force_num_samples=True)
SCHEMES = {
    "w8a8_dynamic": SchemeConfig(),
    "w8a8_static": SchemeConfig(name="w8a8_static", weights_per="tensor"),
    "w8a8_static_asymmetric": SchemeConfig(name="w8a8_static", symmetric_activations=False),
    "w4a16": SchemeConfig(name="w4a16", group_size=32),
    "w4a16_asymmetric": SchemeConfig(name="w4a16", group_size=32, symmetric_weights=False, weight_range="mse"),
    "w8a16": SchemeConfig(name="w8a16"),
    "fp8": SchemeConfig(name="fp8"),
}
# What vLLM's CPU build has kernels for, and the engine's dtype it wants.
ON_CPU = {"w8a8_dynamic": "float32", "w8a8_static_asymmetric": "float32", "fp8": "float32", "w4a16": "bfloat16"}


def export(
    scheme: str, model: PreTrainedModel, policy_dir: Path, sequences: list[Tensor], out_dir: Path
) -> QuantizedModel:
    config = QuantizeConfig(
        scheme=SCHEMES[scheme], calibration=SETTINGS, keep=("lm_head", "model.layers.1.mlp.down_proj")
    )
    quantized = quantize_model(model, sequences, config, seed=0, dtype=torch.float32)
    names = list(linear_layers(model))
    export_policy(policy_dir, out_dir, model=model, layers=quantized.layers, linear_names=names)
    return quantized


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_loads_the_very_weights_that_were_in_memory(
    scheme: str, model: PreTrainedModel, policy_dir: Path, sequences: list[Tensor], tmp_path: Path
):
    quantized = export(scheme, model, policy_dir, sequences, tmp_path)
    loaded = load(tmp_path)
    ids = sequences[0][None]
    logits = loaded(ids).logits  # weights are unpacked at the first call
    for name, linear in linear_layers(loaded).items():
        layer = quantized.layers.get(name)
        expected = linear_layers(model)[name].weight if layer is None else layer.weight.dequantized()
        torch.testing.assert_close(linear.weight.data, expected.data, rtol=0, atol=0)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", "model.layers.1.mlp.down_proj"}
    if not scheme.endswith("dynamic"):  # there transformers divides by 127.5, vLLM by 127
        install(model, quantized.layers)
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-4, rtol=1e-4)


ANSWER = """
import json, sys
from pathlib import Path
from forge_core.config import GeneratorConfig, SamplingConfig
from forge_core.generator import Generator
prompts = json.loads(sys.stdin.read())
for name, dtype in json.loads(sys.argv[2]).items():
    config = GeneratorConfig(max_model_len=64, max_num_seqs=8, dtype=dtype)
    generator = Generator(Path(sys.argv[1]) / name, config=config, seed=0)
    greedy = SamplingConfig(max_tokens=1, temperature=0)
    groups = generator.generate(prompts, num_completions=1, sampling=greedy, seeds=[0] * len(prompts))
    print(json.dumps([name, [one.token_ids[0] for [one] in groups]]))
    generator.close()
"""


@pytest.mark.slow
def test_vllm_answers_like_the_policy_in_memory(policy_dir: Path, sequences: list[Tensor], tmp_path: Path):
    require_same_answers(ON_CPU, policy_dir, sequences, tmp_path)


@pytest.mark.gpu
def test_vllm_answers_like_the_policy_in_memory_on_a_gpu(policy_dir: Path, sequences: list[Tensor], tmp_path: Path):
    require_same_answers({"fp8": "bfloat16", "w8a16": "bfloat16"}, policy_dir, sequences, tmp_path)


def require_same_answers(dtypes: dict[str, str], policy_dir: Path, sequences: list[Tensor], tmp_path: Path) -> None:
    """Greedy first tokens of the exported policies in vLLM are those of the simulation."""
    prompts, expected = sequences[:8], {}
    for scheme in dtypes:
        policy = load(policy_dir)
        quantized = export(scheme, policy, policy_dir, sequences, tmp_path / scheme)
        install(policy, quantized.layers)
        expected[scheme] = [int(policy(ids[None]).logits[0, -1].argmax()) for ids in prompts]
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, str(tmp_path), json.dumps(dtypes)],
        input=json.dumps([ids.tolist() for ids in prompts]),
        capture_output=True,
        text=True,
    )
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert found.keys() == expected.keys(), done.stderr[-2000:]
    for scheme, answers in found.items():
        # The engine rounds in another order, so a near tie may fall the other way.
        assert sum(one == other for one, other in zip(answers, expected[scheme], strict=True)) >= 7, scheme
