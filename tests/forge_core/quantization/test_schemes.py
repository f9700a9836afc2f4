"""Scales, zero points and rounding, by hand and by their properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forge_core.quantization.schemes import (
    ActivationScale,
    fake_quantize_activations,
    integer_parameters,
    quantize_weight,
)
from forge_core.quantize_config import SchemeConfig

SCHEMES = [
    SchemeConfig(name="w8a16"),
    SchemeConfig(name="w8a16", symmetric_weights=False),
    SchemeConfig(name="w8a8_dynamic"),
    SchemeConfig(name="w8a8_static", weights_per="tensor"),
    SchemeConfig(name="w4a16", group_size=4),
    SchemeConfig(name="w4a16", group_size=4, symmetric_weights=False),
    SchemeConfig(name="fp8"),
]
numbers = st.floats(-1e4, 1e4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-4)
weights = st.lists(st.lists(numbers, min_size=8, max_size=8), min_size=1, max_size=3).map(torch.tensor)


def test_symmetric_parameters_by_hand():
    # -1.28 / -128 = 0.01 is more than 0.5 / 127
    scale, zero_point = integer_parameters(torch.tensor(-1.28), torch.tensor(0.5), bits=8, symmetric=True)
    assert scale.item() == pytest.approx(0.01)
    assert zero_point.item() == 0


def test_asymmetric_parameters_by_hand():
    # (4.1 + 1) / 255 = 0.02, and -1 must be -128: zero = -128 + 1 / 0.02 = -78
    scale, zero_point = integer_parameters(torch.tensor(-1.0), torch.tensor(4.1), bits=8, symmetric=False)
    assert scale.item() == pytest.approx(0.02)
    assert zero_point.item() == -78


def test_a_range_above_zero_is_stretched_to_hold_zero():
    # [2, 5.1] becomes [0, 5.1]: scale 0.02, zero point -128
    scale, zero_point = integer_parameters(torch.tensor(2.0), torch.tensor(5.1), bits=8, symmetric=False)
    assert scale.item() == pytest.approx(0.02)
    assert zero_point.item() == -128


def test_four_bits_in_groups_of_two_by_hand():
    # first group: scale 7 / 7 = 1; second: 0.8 / 8 = 0.1
    weight = quantize_weight(torch.tensor([[7.0, -3.4, -0.8, 0.33]]), SchemeConfig(name="w4a16", group_size=2))
    assert weight.values.tolist() == [[7, -3, -8, 3]]
    assert weight.scale.tolist() == [pytest.approx([1.0, 0.1])]
    assert weight.dequantized().tolist() == [pytest.approx([7.0, -3.0, -0.8, 0.3])]


def test_dynamic_activations_have_a_scale_for_each_token():
    # scales 1.27 / 127 = 0.01 and 127 / 127 = 1
    inputs = torch.tensor([[1.27, 0.504], [127.0, 0.504]])
    found = fake_quantize_activations(inputs, SchemeConfig(name="w8a8_dynamic"), None)
    assert found.tolist() == [pytest.approx([1.27, 0.50]), pytest.approx([127.0, 1.0])]


def test_static_activations_beyond_the_range_are_clipped():
    # scale 0.1, zero point -28: integers -128..127 are -10.0..15.5
    scheme = SchemeConfig(name="w8a8_static", symmetric_activations=False)
    found = fake_quantize_activations(torch.tensor([[20.0, -20.0, 0.0, 1.04]]), scheme, ActivationScale(0.1, -28))
    assert found.tolist() == [pytest.approx([15.5, -10.0, 0.0, 1.0])]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(deadline=None)
@given(weight=weights)
def test_a_number_moves_by_at_most_half_a_step_and_zero_not_at_all(scheme: SchemeConfig, weight: torch.Tensor):
    once = quantize_weight(weight, scheme)
    error = (once.dequantized() - weight).abs()
    rows, columns = once.block
    step = once.scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    # float8 has three bits of mantissa: half a step is 1/16 of a number, at least half of its smallest, 2^-9
    allowed = torch.maximum(weight.abs() / 16, step * 2**-10) if scheme.name == "fp8" else step / 2
    assert (error <= allowed * 1.001 + 1e-12).all()
    assert (once.dequantized()[weight == 0] == 0).all()


@settings(deadline=None)
@given(weight=weights)
def test_the_range_of_least_squares_is_never_worse_than_the_whole_range(weight: torch.Tensor):
    errors = [
        (quantize_weight(weight, scheme).dequantized() - weight).square().sum()
        for scheme in (SchemeConfig(name="w4a16", group_size=4, weight_range=name) for name in ("mse", "minmax"))
    ]
    assert errors[0] <= errors[1]


def test_groups_that_do_not_divide_the_inputs_are_refused():
    with pytest.raises(ValueError, match=r"group_size is 64, which does not divide the 96 inputs"):
        quantize_weight(torch.zeros(2, 96), SchemeConfig(name="w4a16"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "w8a8_dynamic", "weights_per": "group"}, "one scale per channel or tensor"),
        ({"name": "w4a16", "weights_per": "tensor"}, "use channel or group"),
        ({"name": "fp8", "symmetric_weights": False}, "no zero points of weights"),
        ({"name": "w4a16", "symmetric_activations": False}, "no integer activations"),
    ],
)
def test_what_no_engine_loads_is_refused(wrong: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        SchemeConfig(**wrong)
