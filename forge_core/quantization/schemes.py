"""Scale, zero point and the numbers themselves: a tensor to its quantized form and back.

    q = clamp(round(x / scale) + zero_point, lowest, highest)        x' = (q - zero_point) * scale

torchao's affine primitives do the integer arithmetic, over blocks that share a scale: (1, n) is a channel, (1, g) a
group, (m, n) the whole tensor. Its model transforms are left alone: they produce tensor subclasses of their own, and
the format that vLLM reads (export.py) wants plain integers beside plain scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine_with_min_max,
    dequantize_affine,
    quantize_affine,
)

from forge_core.quantize_config import SchemeConfig

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
# Shares of the full range that a weight's scale is tried with; below the last one nothing was ever gained.
SHRINKS = [1 - 0.025 * step for step in range(21)]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [m, n] in its quantized form; scale and zero point have one entry for each block."""

    values: Tensor  # [m, n] int8 (four bits as -8..7) or float8
    scale: Tensor  # [m or 1, blocks of a row]
    zero_point: Tensor | None  # as scale, int8; None without one

    @property
    def block(self) -> tuple[int, int]:
        """Shape of what shares a scale."""
        rows, columns = self.values.shape
        return rows // self.scale.shape[0], columns // self.scale.shape[1]

    def dequantized(self) -> Tensor:
        """The weight that a layer computes with, [m, n] float32."""
        if self.values.dtype == FLOAT8:
            return self.values.float() * self.scale.float()
        return dequantize_affine(self.values, self.block, self.scale.float(), self.zero_point, torch.int8)


@dataclass(frozen=True)
class ActivationScale:
    """Scale and zero point of a layer's calibrated input, whole tensor."""

    scale: float
    zero_point: int


def integer_parameters(low: Tensor, high: Tensor, *, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point (int32) that hold [low, high] in signed integers; zero is always exact.

    Symmetric: scale = max(high / (2^(bits-1) - 1), -low / 2^(bits-1)) and zero point 0. Else scale = (high - low) /
    (2^bits - 1), with the range stretched to hold 0.
    """
    return choose_qparams_affine_with_min_max(
        low,
        high,
        MappingType.SYMMETRIC_NO_CLIPPING_ERR if symmetric else MappingType.ASYMMETRIC,
        (),
        torch.int8,
        *integer_range(bits),
        eps=torch.finfo(torch.float32).tiny * 2**24,  # a block of zeros still needs a scale that can be divided by
        zero_point_dtype=torch.int32,
    )


def integer_range(bits: int) -> tuple[int, int]:
    """Lowest and highest signed integer."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def quantize_weight(weight: Tensor, scheme: SchemeConfig, dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """The weight [m, n] in a scheme; scales are rounded to `dtype`, the one that the engine keeps them in, before use.

    Raises ValueError when groups do not divide the inputs.
    """
    weight = weight.detach().float()
    if scheme.name == "fp8":
        blocks = weight.reshape(1, -1) if scheme.weights_per == "tensor" else weight
        scale = (blocks.abs().amax(1, keepdim=True) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        return QuantizedWeight((weight / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale, None)
    best: QuantizedWeight | None = None
    for shrink in SHRINKS if scheme.weight_range == "mse" else [1.0]:
        found = _quantize_integers(weight, scheme, dtype, shrink)
        best = found if best is None else _better_blocks(weight, best, found)
    assert best is not None
    return best


def _quantize_integers(weight: Tensor, scheme: SchemeConfig, dtype: torch.dtype, shrink: float) -> QuantizedWeight:
    block = _block(weight, scheme)
    blocks = _by_block(weight, block)  # [m / rows, n / columns, numbers of a block]
    low, high = blocks.amin(-1) * shrink, blocks.amax(-1) * shrink
    scale, zero_point = integer_parameters(low, high, bits=scheme.bits, symmetric=scheme.symmetric_weights)
    scale = scale.to(dtype)
    values = quantize_affine(weight, block, scale.float(), zero_point, torch.int8, *integer_range(scheme.bits))
    return QuantizedWeight(values, scale, None if scheme.symmetric_weights else zero_point.to(torch.int8))


def _better_blocks(weight: Tensor, one: QuantizedWeight, other: QuantizedWeight) -> QuantizedWeight:
    """Block for block, whichever is closer to the weight."""
    errors = [_by_block((each.dequantized() - weight) ** 2, each.block).sum(-1) for each in (one, other)]
    is_better = errors[1] < errors[0]
    spread = is_better.repeat_interleave(one.block[0], 0).repeat_interleave(one.block[1], 1)
    zero_point = None
    if one.zero_point is not None and other.zero_point is not None:
        zero_point = torch.where(is_better, other.zero_point, one.zero_point)
    return QuantizedWeight(
        torch.where(spread, other.values, one.values), torch.where(is_better, other.scale, one.scale), zero_point
    )


def _block(weight: Tensor, scheme: SchemeConfig) -> tuple[int, int]:
    rows, columns = weight.shape
    match scheme.weights_per:
        case "tensor":
            return rows, columns
        case "channel":
            return 1, columns
        case "group":
            if columns % scheme.group_size:
                raise ValueError(
                    f"scheme.group_size is {scheme.group_size}, which does not divide the {columns} inputs of a layer; "
                    "choose a divisor, or name the layer in keep"
                )
            return 1, scheme.group_size


def _by_block(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """[m, n] -> [m / rows, n / columns, rows * columns]."""
    rows, columns = block
    split = tensor.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))  # [m / rows, rows, n / columns, columns]
    return split.transpose(1, 2).flatten(2)


def fake_quantize_activations(inputs: Tensor, scheme: SchemeConfig, static: ActivationScale | None) -> Tensor:
    """The activations [..., n] as a layer of this scheme sees them, in their own dtype.

    `static` is what calibration found, for w8a8_static; the other schemes scale each token by itself, or not at all.
    """
    if scheme.name in ("w8a16", "w4a16"):
        return inputs
    tokens = inputs.float().reshape(-1, inputs.shape[-1])
    if scheme.name == "fp8":
        scale = (tokens.abs().amax(1, keepdim=True) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        found = (tokens / scale).to(FLOAT8).float() * scale
    else:
        if static is not None:
            scale, zero_point = torch.tensor([[static.scale]]), torch.tensor([[static.zero_point]])
            scale, zero_point = scale.to(tokens.device), zero_point.to(tokens.device)
        else:
            low, high = tokens.amin(1, keepdim=True), tokens.amax(1, keepdim=True)
            if scheme.symmetric_activations:  # as vLLM's kernels: absmax / 127, on either side
                high = torch.maximum(-low, high)
                low = -high
            scale, zero_point = integer_parameters(low, high, bits=8, symmetric=scheme.symmetric_activations)
        integers = (torch.round(tokens / scale) + zero_point).clamp(*integer_range(8))
        found = (integers - zero_point) * scale
    return found.reshape(inputs.shape).to(inputs.dtype)
