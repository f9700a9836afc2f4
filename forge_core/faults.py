"""Faults on purpose: what a drill does to a run, as an explicit plan. A job that carries none is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from pydantic import Field, model_validator

from forge_core.settings import Settings

# Job taken; amid its work; files uploaded, no manifest; manifest committed, owner not told; owner told, no snapshot.
Point = Literal["begin", "work", "before_commit", "after_commit", "answered"]
# Done in a stage process: end it, end its owner (the flow), end both, stop for ever, run out of memory, meet a NaN.
ProcessAction = Literal["kill", "kill_flow", "kill_all", "hang", "out_of_memory", "not_finite"]

Operation = Literal["read", "download", "upload", "create"]
# Done to one storage operation: 503, connection reset, seconds of delay, an upload that vanishes, one cut in half.
StorageAction = Literal["unavailable", "reset", "slow", "lose", "tear"]


class Fault(Settings):
    """One fault; it strikes the first attempts of a job that reach it, `times` in all."""

    job: str = Field(description='The job it strikes: "update v0003", or a stage name for the first job of that stage')
    action: ProcessAction | StorageAction = Field(description="What happens")
    at: Point | Operation = Field("work", description="Point of the stage, or the kind of storage operation")
    times: int = Field(1, ge=1, description="How often it strikes: attempts, or storage operations in a row")
    rank: int = Field(0, ge=0, description="Rank of the trainer that a process fault strikes")

    @model_validator(mode="after")
    def _action_fits_its_place(self) -> Fault:
        is_storage = self.action in get_args(StorageAction)
        places = get_args(Operation if is_storage else Point)
        if self.at not in places:
            raise ValueError(f"faults.at is {self.at}; {self.action} happens at one of {', '.join(places)}")
        if self.action in ("lose", "tear") and self.at != "upload":
            raise ValueError(f"faults.at is {self.at}; only an upload can be torn or lost")
        if self.action == "not_finite" and not self.job.startswith("update"):
            raise ValueError(f"faults.job is {self.job}; not_finite strikes the gradient of an update")
        return self

    def strikes(self, label: str) -> bool:
        """Whether the job with this label is its victim."""
        return label == self.job or label.startswith(f"{self.job} ")


class FaultPlan(Settings):
    """What a drill does to a run. Every attempt of a stage is recorded too, so an empty plan has its use."""

    faults: tuple[Fault, ...] = Field((), description="Faults to inject")


class JobFaults(Settings):
    """The faults that travel with one job, and where the drill keeps its record."""

    record: str = Field(description="URI prefix of the drill's record of attempts and faults")
    faults: tuple[Fault, ...] = Field(description="Faults for this job")


def faults_for(label: str, run_uri: str, plan: FaultPlan | None) -> JobFaults | None:
    """What the job with this label carries; None outside a drill."""
    if plan is None:
        return None
    return JobFaults(record=f"{run_uri}/drill", faults=tuple(fault for fault in plan.faults if fault.strikes(label)))


Outcome = Literal["lose", "tear"]
_strike_storage: Callable[[Operation, str], Outcome | None] | None = None


def inject_into_storage(strike: Callable[[Operation, str], Outcome | None] | None) -> None:
    """From now on `strike` is called before every storage operation of this process; None ends that."""
    global _strike_storage
    _strike_storage = strike


def struck(operation: Operation, uri: str) -> Outcome | None:
    """Called by every storage operation: what is to become of it. Raises what the planned fault raises."""
    return _strike_storage(operation, uri) if _strike_storage else None
