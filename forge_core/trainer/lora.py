"""Low-rank adapters on a torchtitan model: made deterministic, merged into Hugging Face weights, kept in PEFT's layout.

torchtitan's converter puts an adapter beside each target projection and freezes everything else.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.lora import LoRAConverter
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from forge_core.seeds import derive_seed
from forge_core.trainer.weights import copy_into, is_adapter
from forge_core.trainer_config import LoraConfig, Projection

ADAPTER_DIRECTORY = "adapter"

_TORCHTITAN_NAMES: dict[Projection, str] = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_PART = re.compile(r"\.lora_(?P<part>[ab])\.weight$")


def with_adapters(model_config: BaseModel.Config, lora: LoraConfig) -> BaseModel.Config:
    """The description of a model whose target projections have adapters and whose other weights are frozen."""
    targets = [_TORCHTITAN_NAMES[name] for name in lora.target_modules]
    converter = LoRAConverter(LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets))
    converted = converter.convert(model_config)
    assert isinstance(converted, BaseModel.Config)
    return converted


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int) -> None:
    """Draw every A, uniform within 1 / sqrt(inputs), and set every B to 0: the model computes what it does without."""
    for name, parameter in _adapter_parameters(model).items():
        whole = torch.zeros(parameter.shape)
        if _part(name) == "a":
            bound = 1 / math.sqrt(parameter.shape[1])
            generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
            whole.uniform_(-bound, bound, generator=generator)
        copy_into(parameter, whole)


def save_merged(
    whole: dict[str, Tensor], adapter: BaseStateDictAdapter, lora: LoraConfig, out_dir: Path
) -> dict[str, Tensor]:
    """The weights with the adapters merged in, W + alpha / rank * B A; the adapters go to `out_dir` as they are."""
    adapters = {name: tensor for name, tensor in whole.items() if is_adapter(name)}
    merged = {name: tensor for name, tensor in whole.items() if not is_adapter(name)}
    _save_adapters(adapters, adapter, merged, lora, out_dir / ADAPTER_DIRECTORY)
    for name, a in adapters.items():
        if _part(name) == "a":
            weight, b = merged[_target(name)], adapters[name.replace(".lora_a.", ".lora_b.")]
            delta = (b.double() @ a.double()).mul_(lora.alpha / lora.rank)
            merged[_target(name)] = (weight.double() + delta).to(weight.dtype)
    return merged


def _save_adapters(
    adapters: dict[str, Tensor],
    adapter: BaseStateDictAdapter,
    weights: dict[str, Tensor],
    lora: LoraConfig,
    out: Path,
) -> None:
    """Write adapters as PEFT lays them out, for vLLM, transformers with peft, or anything else that reads it."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in adapters.items():
        hf_name, rows = _hf_target(adapter, _target(name), weights[_target(name)].shape)
        # What the rows of W are for Hugging Face, the rows of B are too; A has the inputs as columns.
        stored = tensor[rows] if _part(name) == "b" else tensor
        tensors[_peft_name(hf_name, _part(name))] = stored.contiguous()
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(lora.target_modules),
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def load_adapter(model: nn.Module, adapter: BaseStateDictAdapter, directory: Path) -> None:
    """Take over the adapters that `save_merged` wrote to `directory`, to the bit."""
    stored = load_file(directory / "adapter_model.safetensors")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, parameter in _adapter_parameters(model).items():
        hf_name, rows = _hf_target(adapter, _target(name), shapes[_target(name)])
        tensor = stored.pop(_peft_name(hf_name, _part(name)))
        if _part(name) == "b":
            tensor = torch.empty_like(tensor).index_copy_(0, rows, tensor)
        copy_into(parameter, tensor)
    if stored:
        raise ValueError(f"the adapter in {directory} has targets that trainer.lora has not: {sorted(stored)[:3]}")


def _adapter_parameters(model: nn.Module) -> dict[str, Tensor | DTensor]:
    return {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}


def _part(name: str) -> str:
    found = _PART.search(name)
    assert found is not None
    return found["part"]


def _target(name: str) -> str:
    return _PART.sub(".weight", name)


def _peft_name(hf_name: str, part: str) -> str:
    return f"base_model.model.{hf_name.removesuffix('.weight')}.lora_{part.upper()}.weight"


def _hf_target(adapter: BaseStateDictAdapter, target: str, shape: torch.Size) -> tuple[str, Tensor]:
    """Hugging Face name of a target, and which row of ours each of its rows is (Llama's rotary layout differs)."""
    rows = torch.arange(shape[0], dtype=torch.float64)[:, None].expand(shape).clone()
    ((hf_name, moved),) = adapter.to_hf({target: rows}).items()
    return hf_name, moved[:, 0].long()
