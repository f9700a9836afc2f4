"""Ranges of activations by hand, and that batches and their order do not matter where that is promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.quantization.observers import ActivationStatistics, mse_range, observed_range, percentile_range
from forge_core.quantize_config import CalibrationConfig


def seen_in(*batches: torch.Tensor) -> ActivationStatistics:
    seen = ActivationStatistics.empty(batches[0].shape[1])
    for batch in batches:
        seen.observe(batch)
    return seen


def test_moments_and_ranges_by_hand():
    seen = seen_in(torch.tensor([[1.0, -3.0]]), torch.tensor([[2.0, 4.0]]))
    assert (seen.low, seen.high) == (-3, 4)
    assert seen.channel_absmax().tolist() == [2, 4]
    assert seen.std == pytest.approx(6.5**0.5)  # mean 1: (0 + 16 + 1 + 9) / 4
    assert seen.span_sigmas == pytest.approx(7 / 6.5**0.5)


def test_a_moving_average_follows_the_batches():
    # low: 0.9 * -1 + 0.1 * -3, high: 0.9 * 1 + 0.1 * 2
    seen = seen_in(torch.tensor([[-1.0, 1.0]]), torch.tensor([[-3.0, 2.0]]))
    low, high = observed_range(seen, CalibrationConfig(observer="moving_average"), symmetric=True)
    assert (low, high) == (pytest.approx(-1.2), pytest.approx(1.1))


def test_a_percentile_leaves_out_the_tails():
    seen = seen_in(torch.arange(-100.0, 101.0)[:, None])
    # 201 values; 95 % leaves 5.025 out on either side, so the sixth from the end counts
    assert percentile_range(seen, 95) == (-95, 95)
    assert percentile_range(seen, 100) == (-100, 100)


def test_the_least_squared_error_gives_up_one_outlier_for_many_small_numbers():
    values = torch.linspace(-1, 1, 20001)
    low, high = mse_range(seen_in(torch.cat([values, torch.tensor([8.0])])[:, None]), symmetric=True)
    assert 0.9 < high < 8
    full = mse_range(seen_in(values[:, None]), symmetric=True)
    assert full == pytest.approx((-1, 1), abs=0.02)
    assert low <= 0


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=64),
    cut=st.integers(1, 63),
    seed=st.integers(0, 10),
)
def test_ranges_do_not_depend_on_batches_or_their_order(values: list[float], cut: int, seed: int):
    tokens = torch.tensor(values)[:, None]
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    cut = min(cut, len(tokens) - 1)
    whole, parts = seen_in(tokens), seen_in(tokens[order][cut:], tokens[order][:cut])
    for observer in ("minmax", "percentile", "mse"):
        chosen = CalibrationConfig(observer=observer)
        one, other = (observed_range(each, chosen, symmetric=False) for each in (whole, parts))
        assert one == other
    assert whole.std == pytest.approx(parts.std, rel=1e-6, abs=1e-6)


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        seen_in(torch.tensor([[float("nan")]]))
