"""What the Linear layers of a policy receive on real sequences, and what is done where that is hard to quantize."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from forge_core.quantization.layers import linear_layers, siblings
from forge_core.quantization.observers import ActivationStatistics, observed_range, percentile_range
from forge_core.quantization.schemes import ActivationScale, integer_parameters
from forge_core.quantize_config import CalibrationConfig, QuantizeConfig


def batches(sequences: Sequence[Tensor], settings: CalibrationConfig) -> Iterator[Sequence[Tensor]]:
    """The sequences in batches, `num_iterations` of them unless they end before and `when_exhausted` is stop."""
    starts = range(0, len(sequences), settings.batch_size)
    for iteration in range(settings.num_iterations):
        if iteration >= len(starts) and settings.when_exhausted == "stop":
            return
        start = starts[iteration % len(starts)]
        yield sequences[start : start + settings.batch_size]


def padded(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids [B, L] and a mask of those that are no padding, which is on the right: causal attention hides it."""
    ids = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


@torch.no_grad()
def record(
    model: nn.Module, sequences: Sequence[Tensor], names: Sequence[str], settings: CalibrationConfig
) -> dict[str, ActivationStatistics]:
    """Statistics of the inputs of the named layers; layers with the same input share them."""
    seen: dict[str, ActivationStatistics] = {}
    device = next(model.parameters()).device
    with _hooked(model, names, seen, settings) as is_token:
        for batch in batches(sequences, settings):
            ids, mask = padded(batch)
            is_token[:] = [mask.to(device)]
            model(ids.to(device))
    return {name: seen[siblings(name)[0]] for name in names}


@contextmanager
def _hooked(
    model: nn.Module, names: Sequence[str], seen: dict[str, ActivationStatistics], settings: CalibrationConfig
) -> Iterator[list[Tensor]]:
    """Observe the layers inside the block; the list holds the mask [B, L] of the batch that runs."""
    is_token: list[Tensor] = []

    def observe(name: str, inputs: Tensor) -> None:
        if name not in seen:
            seen[name] = ActivationStatistics.empty(inputs.shape[-1])
        try:
            seen[name].observe(inputs[is_token[0]], settings.averaging)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    first = {siblings(name)[0] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, inputs, name=name: observe(name, inputs[0]))
        for name in sorted(first)
    ]
    try:
        yield is_token
    finally:
        for hook in hooks:
            hook.remove()


def flagged(seen: dict[str, ActivationStatistics], settings: CalibrationConfig) -> list[str]:
    """Layers whose inputs span more than `flag_sigmas` standard deviations: few numbers take most of the scale."""
    return [name for name, one in seen.items() if one.span_sigmas > settings.flag_sigmas]


def activation_scale(seen: ActivationStatistics, config: QuantizeConfig, *, is_clipped: bool) -> ActivationScale:
    """Scale and zero point of a layer's calibrated input; `is_clipped` takes the percentile whatever the observer."""
    symmetric = config.scheme.symmetric_activations
    settings = config.calibration
    if is_clipped:
        low, high = percentile_range(seen, settings.percentile)
    else:
        low, high = observed_range(seen, settings, symmetric=symmetric)
    scale, zero_point = integer_parameters(torch.tensor(low), torch.tensor(high), bits=8, symmetric=symmetric)
    return ActivationScale(scale.item(), int(zero_point))


def drift(scale: ActivationScale, previous: ActivationScale) -> float:
    """How far the zero point has moved, as a share of the 255 steps of the quantized range."""
    return abs(scale.zero_point - previous.zero_point) / 255


@torch.no_grad()
def smooth(
    model: nn.Module, seen: dict[str, ActivationStatistics], names: Sequence[str], smoothing: float
) -> tuple[list[str], list[str]]:
    """Move scale from the inputs of layers into their weights (SmoothQuant, arXiv:2211.10438), in place.

    s_j = max|x_j|^a / max|W_j|^(1-a), and what makes channel j of the input is divided by s_j: the norm before
    attention and feed-forward, the rows of up_proj before down_proj. s is rounded to a power of two, so that the policy
    computes the same numbers as before in any floating-point format. Returns the layers it reached and those it
    could not: between v_proj and o_proj heads are shared, so nothing exact is there to divide.
    """
    linears = linear_layers(model)
    done: set[str] = set()
    unreachable: list[str] = []
    for name in names:
        if name in done or name in unreachable:
            continue
        source = _source(model, name)
        if source is None:
            unreachable.append(name)
            continue
        group = [linears[each] for each in siblings(name) if each in linears]
        done |= {each for each in siblings(name) if each in linears}
        largest_weight = torch.stack([linear.weight.abs().amax(0) for linear in group]).amax(0).float()
        largest_input = seen[name].channel_absmax().to(largest_weight.device)
        scale = largest_input**smoothing / largest_weight ** (1 - smoothing)
        scale = torch.where((scale > 0) & scale.isfinite(), scale, 1.0).log2().round().clamp(-20, 20).exp2()
        scale = scale.to(group[0].weight.dtype)
        for linear in group:
            linear.weight.mul_(scale)
        source.div_(scale if source.dim() == 1 else scale[:, None])
    return sorted(done), unreachable


def _source(model: nn.Module, name: str) -> Tensor | None:
    """The weight whose entries (or rows) scale the channels of a layer's input, where there is exactly one."""
    block, _, last = name.rpartition(".")
    layer = block.rpartition(".")[0]
    sources = dict.fromkeys(("q_proj", "k_proj", "v_proj"), f"{layer}.input_layernorm")
    sources |= dict.fromkeys(("gate_proj", "up_proj"), f"{layer}.post_attention_layernorm")
    sources["down_proj"] = f"{block}.up_proj"
    modules = dict(model.named_modules())
    source = modules.get(sources[last]) if last in sources else None
    if source is None or getattr(source, "bias", None) is not None:
        return None
    weight = source.weight
    assert isinstance(weight, Tensor)
    return weight.data


def signal_to_noise(signal: float, noise: float) -> float:
    """Decibels of a signal's energy over that of its error (SQNR); 200 stands for no error at all."""
    return 200.0 if noise == 0 else min(200.0, 10 * math.log10(max(signal, 1e-300) / noise))
