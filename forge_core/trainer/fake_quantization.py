"""Quantization-aware training: Linear layers of the trainer compute with quantized numbers, gradients pass them by.

torchao's fake quantizers swap modules, which would rename the weights that are sharded and exported; here only the
forward pass of a layer is another one while the block runs. Its numbers are those that are exported later
(forge_core/quantization/schemes.py), but calibrated activations are stood in for by a scale for each token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from forge_core.quantization.layers import quantizable
from forge_core.quantization.schemes import fake_quantize_activations, quantize_weight
from forge_core.quantize_config import QuantizeConfig

_WRAPPER = "_checkpoint_wrapped_module."  # in the names of layers whose activations are recomputed


@contextmanager
def fake_quantized(model: nn.Module, adapter: BaseStateDictAdapter, config: QuantizeConfig) -> Iterator[list[str]]:
    """Compute as quantized inside the block; yields the layers that do, by their Hugging Face names."""
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    layers = {_hf_name(name, layer, adapter): layer for name, layer in linears.items()}
    names = quantizable(layers, config.keep)
    names = [name for name in names if name != "lm_head"]  # its log-probs have a forward pass of their own
    for name in names:
        layers[name].forward = functools.partial(_forward, layers[name], config)
    try:
        yield names
    finally:
        for name in names:
            del layers[name].forward


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers, with the gradient of the exact ones (arXiv:1308.3432)."""
    return exact + (rounded - exact).detach()


def _forward(layer: nn.Linear, config: QuantizeConfig, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        weight = quantize_weight(layer.weight, config.scheme, layer.weight.dtype).dequantized().to(layer.weight.dtype)
        activations = fake_quantize_activations(inputs, config.scheme, None)
    return F.linear(straight_through(inputs, activations), straight_through(layer.weight, weight), layer.bias)


def _hf_name(name: str, layer: nn.Module, adapter: BaseStateDictAdapter) -> str:
    weight = torch.empty(layer.get_parameter("weight").shape, device="meta")
    hf_names = list(adapter.to_hf({f"{name.replace(_WRAPPER, '')}.weight": weight}))
    return hf_names[0].removesuffix(".weight") if hf_names else name  # an output layer tied to the embeddings has none
