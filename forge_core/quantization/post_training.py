"""From a policy and sequences to quantized layers: calibrate, remedy what is flagged, quantize."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forge_core.quantization import calibration
from forge_core.quantization.errors import measure_errors
from forge_core.quantization.layers import QuantizedLayer, linear_layers, quantizable, siblings
from forge_core.quantization.observers import ActivationStatistics
from forge_core.quantization.schemes import quantize_weight
from forge_core.quantize_config import QuantizeConfig

NUM_SENSITIVITY_SAMPLES = 64  # sensitivity is measured on what was calibrated on, not on what is held out


@dataclass(frozen=True)
class QuantizedModel:
    """The quantized layers of a model, and how they came about; the model itself stays unquantized."""

    layers: dict[str, QuantizedLayer]
    before: dict[str, ActivationStatistics]  # of every layer that could be quantized, before the remedy
    seen: dict[str, ActivationStatistics]  # and after it
    flagged: list[str]  # before the remedy
    remedied: list[str]
    kept: list[str]  # in high precision because they were flagged, or are sensitive
    still_flagged: list[str]
    num_samples: int


def quantize_model(
    model: nn.Module,
    pool: Sequence[Tensor],
    config: QuantizeConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    max_mae: float = 0.0,
) -> QuantizedModel:
    """Quantize the Linear layers of a model, which smoothing may change in place without changing what it computes.

    `pool` are the sequences to calibrate on, of which `num_samples` are drawn; `dtype` is that of the scales, and
    `max_mae` the error that `mixed: auto` stays within.
    """
    settings, names = config.calibration, quantizable(linear_layers(model), config.keep)
    draws = settings.max_resamples if config.remedy == "resample" else 1
    flagged, seen, samples, first_flagged = [], {}, [], None
    for draw in range(draws):
        drawn = _draw(pool, settings.num_samples, seed + draw)
        found = calibration.record(model, drawn, names, settings)
        flags = calibration.flagged(found, settings)
        first_flagged = flags if first_flagged is None else first_flagged
        if draw == 0 or len(flags) < len(flagged):
            flagged, seen, samples = flags, found, drawn
        if not flagged:
            break
    assert first_flagged is not None
    before, kept = seen, list[str]()
    remedied = [name for name in first_flagged if name not in flagged]
    match config.remedy:
        case "keep":
            kept = flagged
        case "smooth" if flagged:
            remedied, kept = calibration.smooth(model, seen, flagged, settings.smoothing)
            seen = calibration.record(model, samples, names, settings)  # the ranges are others now
        case "clip":
            remedied = flagged
    kept = sorted({each for name in kept for each in siblings(name) if each in names})
    if len(kept) == len(names):
        raise ValueError(
            f"every layer is flagged, so calibration.remedy {config.remedy} would leave all in high precision; raise "
            f"calibration.flag_sigmas ({settings.flag_sigmas:g}), or take smooth, clip or report"
        )
    is_clipped = config.remedy == "clip"
    layers = {
        name: QuantizedLayer(
            config.scheme,
            quantize_weight(linear.weight, config.scheme, dtype),
            calibration.activation_scale(seen[name], config, is_clipped=is_clipped and name in flagged)
            if config.scheme.name == "w8a8_static"
            else None,
        )
        for name, linear in linear_layers(model).items()
        if name in names and name not in kept
    }
    if config.mixed == "auto":
        noisy = sensitive_layers(model, layers, samples[:NUM_SENSITIVITY_SAMPLES], max_mae, settings.batch_size)
        layers = {name: layer for name, layer in layers.items() if name not in noisy}
        kept = sorted({*kept, *noisy})
    still = [] if is_clipped else [name for name in calibration.flagged(seen, settings) if name not in kept]
    return QuantizedModel(layers, before, seen, first_flagged, remedied, kept, still, len(samples))


def sensitive_layers(
    model: nn.Module, layers: dict[str, QuantizedLayer], sequences: Sequence[Tensor], max_mae: float, batch_size: int
) -> set[str]:
    """As few layers as possible, noisiest first, without which the error on these sequences is below `max_mae`.

    Found by bisection, so for errors that fall with every layer left out. Raises ValueError when none would be left.
    """
    errors, output = measure_errors(model, layers, sequences, batch_size)
    if output.mae < max_mae:
        return set()
    groups = {tuple(each for each in siblings(name) if each in layers) for name in layers}
    ranked = sorted(groups, key=lambda group: (min(errors[name].sqnr for name in group), group))
    too_few, enough = 0, len(ranked)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        out = {name for group in ranked[:middle] for name in group}
        rest = {name: layer for name, layer in layers.items() if name not in out}
        _, output = measure_errors(model, rest, sequences, batch_size)
        too_few, enough = (too_few, middle) if output.mae < max_mae else (middle, enough)
    if enough == len(ranked):
        raise ValueError(
            f"mixed is auto, but with any layer quantized the error is above gates.max_mae ({max_mae:g}); choose "
            "another scheme"
        )
    return {name for group in ranked[:enough] for name in group}


def _draw(pool: Sequence[Tensor], count: int, seed: int) -> list[Tensor]:
    """`count` sequences, the same ones for the same seed; raises ValueError when there are fewer."""
    if len(pool) < count:
        raise ValueError(
            f"calibration.num_samples is {count}, but there are {len(pool)} sequences besides those held out; give "
            "more rollouts, or lower num_samples"
        )
    return [pool[place] for place in random.Random(seed).sample(range(len(pool)), count)]
