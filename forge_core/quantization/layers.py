"""The Linear layers of a policy: which share their input, which are quantized, and how they compute afterwards."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.quantization.schemes import ActivationScale, QuantizedWeight, fake_quantize_activations
from forge_core.quantize_config import SchemeConfig

# Layers with the same input, which vLLM fuses into one: they are quantized alike or not at all.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class QuantizedLayer:
    """One Linear layer, quantized."""

    scheme: SchemeConfig
    weight: QuantizedWeight
    static: ActivationScale | None  # of its input, for w8a8_static


class QuantizedLinear(nn.Module):
    """A Linear layer that computes with quantized numbers, simulated in floating point."""

    def __init__(self, layer: QuantizedLayer, original: nn.Linear) -> None:
        super().__init__()
        self._layer = layer
        self.register_buffer("weight", layer.weight.dequantized().to(original.weight.dtype), persistent=False)
        self.bias = original.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [..., m] of inputs [..., n]."""
        inputs = fake_quantize_activations(inputs, self._layer.scheme, self._layer.static)
        return F.linear(inputs, self.get_buffer("weight"), self.bias)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every Linear layer by the name that its weights have in a checkpoint."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def quantizable(names: Iterable[str], keep: Iterable[str]) -> list[str]:
    """The layers that no pattern of `keep` names; a layer fused with a kept one is kept too.

    Raises ValueError when a pattern names no layer.
    """
    names, patterns = list(names), list(keep)
    for pattern in patterns:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise ValueError(
                f"keep has {pattern}, which names no layer of the policy; layers are called {', '.join(names[:2])}, ..."
            )
    kept = {sibling for name in names if _matches(name, patterns) for sibling in siblings(name)}
    return [name for name in names if name not in kept]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def siblings(name: str) -> tuple[str, ...]:
    """The layers that share this one's input, itself included."""
    parent, _, last = name.rpartition(".")
    for group in FUSED:
        if last in group:
            return tuple(f"{parent}.{each}" for each in group)
    return (name,)


def install(model: nn.Module, layers: dict[str, QuantizedLayer]) -> None:
    """Replace Linear layers of the model by their quantized form."""
    for name, layer in layers.items():
        original = model.get_submodule(name)
        assert isinstance(original, nn.Linear)
        model.set_submodule(name, QuantizedLinear(layer, original))
