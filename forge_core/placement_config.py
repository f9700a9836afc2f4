"""Where the stages of a run are made: in the flow's own machine, or in the work pools that are named here.

Which machine makes an artifact decides nothing about it. The rules by which a stage goes from pool to pool are here,
without Prefect, as functions of what is known about the pools.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal

from pydantic import Field, field_validator

from forge_core.settings import Settings
from forge_core.stage_job import STAGE_VERSIONS

PoolState = Literal["ready", "paused", "full", "without a worker"]


class PlacementConfig(Settings):
    """Stages that are sent to work pools, the others run where the flow does; and how many replicas share a rollout."""

    pools: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Work pools by stage, the first choice first, e.g. {rollout: [spot, reserved], score: [cpu]}",
    )
    rollout_shards: int = Field(
        1, ge=1, description="Parts that a rollout set is sampled in, at once where `rollout` is in pools"
    )
    redirect_after_seconds: float = Field(
        60.0,
        gt=0,
        description="Seconds a stage waits for a worker of its pool to take it before it goes to the next pool",
    )

    @field_validator("pools")
    @classmethod
    def _are_pools_of_stages(cls, pools: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for stage, names in pools.items():
            if stage not in STAGE_VERSIONS:
                close = get_close_matches(stage, STAGE_VERSIONS, n=1)
                known = f"did you mean {close[0]}?" if close else f"there are {', '.join(STAGE_VERSIONS)}"
                raise ValueError(f"{stage} is not a stage; {known}")
            if not names or len(set(names)) < len(names):
                raise ValueError(
                    f"the pools of {stage} are {list(names)}; name at least one, each once, or leave the stage out"
                )
        return pools


def choose(pools: Sequence[str], states: Mapping[str, PoolState], passed_over: Collection[str]) -> str:
    """The pool for a new stage: the first one, without those that had their time and still are not ready."""
    return next((pool for pool in pools if pool not in passed_over or states[pool] == "ready"), pools[0])


def choose_after(current: str, pools: Sequence[str], states: Mapping[str, PoolState]) -> str | None:
    """The pool that a stage goes to from `current`: the next one of the list, around it, that is ready.

    None when there is none, so that it stays: a queue is left only for a pool that seems to take it.
    """
    place = pools.index(current) if current in pools else -1
    around = [*pools[place + 1 :], *pools[: max(place, 0)]]
    return next((pool for pool in around if states[pool] == "ready"), None)
