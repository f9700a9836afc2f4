"""A quantized policy on disk, in the compressed-tensors layout that vLLM and transformers load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    QuantizationType,
)
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from forge_core.quantization.layers import QuantizedLayer
from forge_core.quantize_config import WEIGHT_ONLY, SchemeConfig

_STRATEGIES = {
    "channel": QuantizationStrategy.CHANNEL,
    "tensor": QuantizationStrategy.TENSOR,
    "group": QuantizationStrategy.GROUP,
}
NOT_COPIED = ("config.json", "*.safetensors", "*.safetensors.index.json")


def export_policy(
    source: Path, out_dir: Path, *, model: nn.Module, layers: dict[str, QuantizedLayer], linear_names: list[str]
) -> None:
    """Write the policy with these layers quantized; all other weights are those of `model`, to the bit.

    `source` is the policy that was quantized: tokenizer and the rest are copied from it. `linear_names` are all Linear
    layers, of which those not quantized are listed as such.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(checkpoint(model, layers), out_dir, max_shard_size="5GB")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(layers, linear_names)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in NOT_COPIED):
            shutil.copyfile(path, out_dir / path.name)


def checkpoint(model: nn.Module, layers: dict[str, QuantizedLayer]) -> dict[str, Tensor]:
    """Tensors by their names on disk; a matrix shared with the embeddings appears once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name.removesuffix(".weight") not in layers and id(parameter) not in seen:
            seen.add(id(parameter))
            tensors[name] = parameter.detach().cpu().contiguous().clone()
    for name, layer in layers.items():
        for suffix, tensor in layer_tensors(layer).items():
            tensors[f"{name}.{suffix}"] = tensor.contiguous()
    return tensors


def layer_tensors(layer: QuantizedLayer) -> dict[str, Tensor]:
    """What a checkpoint holds of one quantized layer, its bias apart."""
    weight, scheme = layer.weight, layer.scheme
    if scheme.name in WEIGHT_ONLY:
        tensors = {
            "weight_packed": pack_to_int32(weight.values, scheme.bits),
            "weight_scale": weight.scale,
            "weight_shape": torch.tensor(weight.values.shape),
        }
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = pack_to_int32(weight.zero_point, scheme.bits, packed_dim=0)
        return tensors
    scale = weight.scale.reshape(1) if scheme.weights_per == "tensor" else weight.scale
    tensors = {"weight": weight.values, "weight_scale": scale}
    if layer.static is not None:
        tensors["input_scale"] = torch.tensor([layer.static.scale])
        if not scheme.symmetric_activations:
            tensors["input_zero_point"] = torch.tensor([layer.static.zero_point], dtype=torch.int8)
    return tensors


def quantization_config(layers: dict[str, QuantizedLayer], linear_names: list[str]) -> dict:
    """The section of config.json that names the schemes, and the Linear layers left in high precision."""
    schemes: dict[str, SchemeConfig] = {}
    targets: dict[str, list[str]] = {}
    for name, layer in layers.items():
        key = layer.scheme.model_dump_json()
        schemes[key] = layer.scheme
        targets.setdefault(key, []).append(name)
    is_mixed = len(schemes) > 1
    groups = {
        f"group_{place}": QuantizationScheme(
            targets=targets[key] if is_mixed else ["Linear"],
            weights=_weights(scheme),
            input_activations=_activations(scheme),
            format=_format(scheme),
        )
        for place, (key, scheme) in enumerate(schemes.items())
    }
    formats = {_format(scheme) for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups=groups,
        quantization_status=QuantizationStatus.COMPRESSED,
        format=(CompressionFormat.mixed_precision if len(formats) > 1 else formats.pop()).value,
        ignore=[name for name in linear_names if name not in layers],
    )
    return json.loads(config.model_dump_json(exclude_none=True)) | {"quant_method": "compressed-tensors"}


def _format(scheme: SchemeConfig) -> CompressionFormat:
    if scheme.name in WEIGHT_ONLY:
        return CompressionFormat.pack_quantized
    return CompressionFormat.float_quantized if scheme.name == "fp8" else CompressionFormat.int_quantized


def _weights(scheme: SchemeConfig) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=scheme.bits,
        type=QuantizationType.FLOAT if scheme.name == "fp8" else QuantizationType.INT,
        symmetric=scheme.symmetric_weights,
        strategy=_STRATEGIES[scheme.weights_per],
        group_size=scheme.group_size if scheme.weights_per == "group" else None,
    )


def _activations(scheme: SchemeConfig) -> QuantizationArgs | None:
    if scheme.name in WEIGHT_ONLY:
        return None
    is_static = scheme.name == "w8a8_static"
    return QuantizationArgs(
        num_bits=8,
        type=QuantizationType.FLOAT if scheme.name == "fp8" else QuantizationType.INT,
        symmetric=scheme.symmetric_activations,
        strategy=QuantizationStrategy.TENSOR if is_static else QuantizationStrategy.TOKEN,
        dynamic=not is_static,
    )
