"""Alarms: what is out of bounds is said, and stops a run only where that was asked for."""

from __future__ import annotations

import math

import pytest

from forge_core.alarms import DEFAULT_ALARMS, AlarmError, BoundsConfig, find_alarms, stop_if_asked


def test_a_metric_raises_an_alarm_outside_of_its_bounds_alone():
    bounds = {"kl/reference": BoundsConfig(high=0.5), "entropy/mean": BoundsConfig(low=0.1, high=3)}
    assert find_alarms({"kl/reference": 0.5, "entropy/mean": 0.1}, bounds) == {}
    found = find_alarms({"kl/reference": 0.6, "entropy/mean": 0.05}, bounds)
    assert found == {
        "kl/reference": "kl/reference is 0.6, outside of [-inf, 0.5]",
        "entropy/mean": "entropy/mean is 0.05, outside of [0.1, 3]",
    }


def test_a_metric_that_is_not_a_number_is_out_of_every_bound_and_one_that_is_absent_of_none():
    bounds = {"kl/reference": BoundsConfig(high=0.5)}
    assert find_alarms({"kl/reference": math.nan}, bounds).keys() == {"kl/reference"}
    assert find_alarms({"reward/mean": 9.0}, bounds) == {}


def test_only_an_alarm_that_is_to_stop_the_run_does_and_says_how_to_go_on():
    bounds = {"a": BoundsConfig(high=1), "b": BoundsConfig(high=1, stop=True)}
    stop_if_asked(find_alarms({"a": 2, "b": 1}, bounds), bounds)
    with pytest.raises(AlarmError, match=r"^b is 2, outside of \[-inf, 1\]\. .* widen the bounds in grpo\.alarms"):
        stop_if_asked(find_alarms({"a": 2, "b": 2}, bounds), bounds)


def test_the_default_bounds_hold_for_engines_that_agree_and_not_for_ones_that_do_not():
    sound = {"logprob_gap/mean": 0.015, "kl/mismatch": 2e-4, "kl/behavior": 0.001, "entropy/mean": 0.4}
    assert find_alarms(sound, DEFAULT_ALARMS) == {}
    broken = {"logprob_gap/mean": 0.5, "kl/mismatch": 0.1, "kl/behavior": 0.3, "entropy/mean": 1e-5}
    assert find_alarms(broken, DEFAULT_ALARMS).keys() == DEFAULT_ALARMS.keys()
