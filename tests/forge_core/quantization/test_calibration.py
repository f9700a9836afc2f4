"""Calibration of a tiny policy, and the remedies for what is hard to quantize."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from forge_core.quantization import calibration
from forge_core.quantization.errors import measure_errors
from forge_core.quantization.layers import linear_layers, quantizable
from forge_core.quantization.post_training import QuantizedModel, quantize_model
from forge_core.quantization.schemes import ActivationScale
from forge_core.quantize_config import CalibrationConfig, QuantizeConfig, SchemeConfig

FEW = {"num_samples": 32, "force_num_samples": True, "batch_size": 8}
Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantized(model: PreTrainedModel, sequences: list[Tensor], scheme: str, **settings) -> QuantizedModel:
    config = QuantizeConfig(scheme=SchemeConfig(name=scheme), calibration=CalibrationConfig(**FEW | settings))
    return quantize_model(model, sequences, config, seed=0, dtype=torch.float32)


def make_hard(model: PreTrainedModel, factor: float = 100.0) -> None:
    """Scale one channel of the inputs of attention; its weights make up for it, so the policy stays what it is."""
    with torch.no_grad():
        layer = model.get_submodule("model.layers.0")
        layer.get_submodule("input_layernorm").weight[3] *= factor
        for name in ("q_proj", "k_proj", "v_proj"):
            layer.get_submodule(f"self_attn.{name}").weight[:, 3] /= factor


def test_recorded_ranges_are_those_of_the_tokens_whatever_the_batches(model: PreTrainedModel, sequences: list[Tensor]):
    names = list(linear_layers(model))
    one, other = (
        calibration.record(model, order, names, CalibrationConfig(**FEW | {"batch_size": size, "num_iterations": 40}))
        for size, order in ((8, sequences), (1, sequences[::-1]))
    )
    for name in names:
        torch.testing.assert_close(one[name].channel_high, other[name].channel_high, atol=1e-5, rtol=1e-5)
        assert one[name].num_values == other[name].num_values
    num_tokens = sum(len(sequence) for sequence in sequences)
    assert one[Q_PROJ].num_values == num_tokens * 64


def test_samples_that_end_early_stop_or_go_round():
    sequences = [torch.tensor([place]) for place in range(5)]

    def starts(when: str) -> list[int]:
        settings = CalibrationConfig(
            num_samples=5, force_num_samples=True, batch_size=2, num_iterations=5, when_exhausted=when
        )
        return [int(batch[0]) for batch in calibration.batches(sequences, settings)]

    assert starts("stop") == [0, 2, 4]
    assert starts("go_round") == [0, 2, 4, 0, 2]


def test_an_unusual_number_of_samples_must_be_forced():
    with pytest.raises(ValidationError, match="num_samples is 64, outside of 128-512"):
        CalibrationConfig(num_samples=64)


@pytest.mark.parametrize(("remedy", "scheme"), [("clip", "w8a8_dynamic"), ("smooth", "w4a16"), ("resample", "fp8")])
def test_a_remedy_without_effect_is_refused(remedy: str, scheme: str):
    with pytest.raises(ValidationError, match=f"remedy is {remedy}"):
        QuantizeConfig(scheme=SchemeConfig(name=scheme), calibration=CalibrationConfig(remedy=remedy))


def test_smoothing_changes_nothing_that_the_policy_computes(model: PreTrainedModel, sequences: list[Tensor]):
    make_hard(model)
    names = list(linear_layers(model))
    ids = sequences[0][None]
    before = model(ids).logits
    seen = calibration.record(model, sequences, names, CalibrationConfig(**FEW))
    reached, unreachable = calibration.smooth(model, seen, names, 0.5)
    assert torch.equal(model(ids).logits, before)
    assert {name.rpartition(".")[2] for name in unreachable} == {"o_proj", "lm_head"}
    assert Q_PROJ in reached
    after = calibration.record(model, sequences, names, CalibrationConfig(**FEW))
    assert after[Q_PROJ].span_sigmas < seen[Q_PROJ].span_sigmas / 3


@pytest.mark.parametrize("remedy", ["smooth", "keep"])
@pytest.mark.parametrize("scheme", ["w8a8_dynamic", "w8a8_static"])
def test_a_policy_made_hard_is_flagged_fails_plainly_and_passes_after_the_remedy(
    model: PreTrainedModel, sequences: list[Tensor], scheme: str, remedy: str
):
    make_hard(model)
    plain = quantized(model, sequences, scheme, remedy="report", flag_sigmas=20)
    _, error = measure_errors(model, plain.layers, sequences, 8)
    assert Q_PROJ in plain.flagged
    assert error.mae > 0.01

    remedied = quantized(model, sequences, scheme, remedy=remedy, flag_sigmas=20)
    _, error = measure_errors(model, remedied.layers, sequences, 8)
    assert error.mae < 0.01
    assert (Q_PROJ in remedied.layers) == (remedy == "smooth")
    assert not remedied.still_flagged


def test_mixed_keeps_as_few_layers_as_bring_the_error_within_its_bound(model: PreTrainedModel, sequences: list[Tensor]):
    make_hard(model)
    settings = CalibrationConfig(**FEW, remedy="report")
    config = QuantizeConfig(scheme=SchemeConfig(name="w8a8_dynamic"), mixed="auto", calibration=settings)

    def mixed(max_mae: float) -> QuantizedModel:
        return quantize_model(model, sequences, config, seed=0, dtype=torch.float32, max_mae=max_mae)

    assert not mixed(1.0).kept
    some = mixed(0.01)
    assert some.kept == sorted(f"model.layers.0.self_attn.{name}" for name in ("k_proj", "q_proj", "v_proj"))
    assert measure_errors(model, some.layers, sequences, 8)[1].mae < 0.01
    with pytest.raises(ValueError, match="with any layer quantized"):
        mixed(1e-9)


def test_clipping_narrows_the_range_of_flagged_layers_only(model: PreTrainedModel, sequences: list[Tensor]):
    make_hard(model)
    plain = quantized(model, sequences, "w8a8_static", remedy="report", flag_sigmas=20)
    clipped = quantized(model, sequences, "w8a8_static", remedy="clip", percentile=95, flag_sigmas=20)
    for name, layer in plain.layers.items():
        assert layer.static is not None
        other = clipped.layers[name].static
        assert other is not None
        assert (other.scale < layer.static.scale) == (name in plain.flagged)


def test_drift_by_hand():
    assert calibration.drift(ActivationScale(0.1, -20), ActivationScale(0.1, 31)) == pytest.approx(51 / 255)


def test_layers_that_share_an_input_are_kept_together_and_patterns_must_name_something(model: PreTrainedModel):
    names = quantizable(linear_layers(model), ["lm_head", "model.layers.1.self_attn.k_proj"])
    attention = [name for name in names if name.startswith("model.layers.1.self_attn")]
    assert attention == ["model.layers.1.self_attn.o_proj"]
    with pytest.raises(ValueError, match=r"keep has model.layer.0"):
        quantizable(linear_layers(model), ["model.layer.0*"])
