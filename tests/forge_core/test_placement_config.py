"""Which pool a stage goes to, given what is known about the pools."""

from __future__ import annotations

import pytest

from forge_core.config import RunConfig
from forge_core.placement_config import PoolState, choose, choose_after

POOLS = ("spot", "reserved", "cpu")


def states(spot: PoolState = "ready", reserved: PoolState = "ready", cpu: PoolState = "ready") -> dict[str, PoolState]:
    return {"spot": spot, "reserved": reserved, "cpu": cpu}


def test_a_stage_goes_to_the_first_pool_of_its_list():
    assert choose(POOLS, states(), passed_over=set()) == "spot"


def test_a_pool_that_is_not_ready_is_given_its_time():
    assert choose(POOLS, states(spot="paused"), passed_over=set()) == "spot"


def test_a_pool_that_had_its_time_and_is_still_not_ready_is_passed_over():
    assert choose(POOLS, states(spot="without a worker"), passed_over={"spot"}) == "reserved"
    assert choose(POOLS, states(), passed_over={"spot"}) == "spot"


def test_with_every_pool_out_the_first_one_is_waited_for():
    out = states("paused", "full", "without a worker")
    assert choose(POOLS, out, passed_over=set(POOLS)) == "spot"


@pytest.mark.parametrize(
    ("current", "known", "expected"),
    [
        ("spot", states(), "reserved"),
        ("spot", states(reserved="full"), "cpu"),
        ("reserved", states(cpu="paused"), "spot"),
        ("cpu", states(), "spot"),
        ("spot", states("paused", "full", "without a worker"), None),
        ("spot", states(reserved="full", cpu="paused"), None),
        ("gone", states(), "spot"),
    ],
)
def test_the_next_pool_is_the_next_ready_one_around_the_list(current: str, known: dict, expected: str | None):
    assert choose_after(current, POOLS, known) == expected


def test_a_stage_with_one_pool_stays_there():
    assert choose_after("spot", ("spot",), {"spot": "paused"}) is None


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"pools": {"rolout": ["spot"]}}, "rolout is not a stage; did you mean rollout?"),
        ({"pools": {"zzz": ["spot"]}}, "zzz is not a stage; there are dataset, overlap, start"),
        ({"pools": {"rollout": []}}, r"pools of rollout are \[\]; name at least one"),
        ({"pools": {"rollout": ["a", "a"]}}, r"are \['a', 'a'\]; name at least one, each once"),
        ({"redirect_after_seconds": 0}, r"redirect_after_seconds\s+Input should be greater than 0"),
    ],
)
def test_a_placement_that_cannot_work_is_refused(placement: dict, message: str):
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"placement": placement})
