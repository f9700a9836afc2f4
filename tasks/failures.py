"""What is done about a stage that failed, by the class of its failure."""

from __future__ import annotations

from typing import Literal

from forge_core.stages.process import StageError
from forge_core.storage_errors import StorageUnavailableError

FailureClass = Literal["storage", "died", "timeout", "out_of_memory", "not_finite", "permanent"]

# Attempts of a stage after its first, by the class of the failure. A trainer or generator that ran out of memory gets
# half the micro-batch or half the sequences each time. What is permanent (a wrong setting, damaged data) would only
# fail again.
RETRIES: dict[FailureClass, int] = {
    "storage": 5,
    "died": 3,
    "timeout": 1,
    "out_of_memory": 4,
    "not_finite": 1,
    "permanent": 0,
}
_CLASS_BY_CAUSE: dict[str, FailureClass] = {
    "died": "died",
    "timeout": "timeout",
    "OutOfMemory": "out_of_memory",
    "NonFiniteError": "not_finite",
    "StorageUnavailable": "storage",
    "EngineDeadError": "died",  # vLLM's own word for an engine that cannot go on
}


class StageStoppedError(RuntimeError):
    """A stage failed for good: its failure is permanent, or has been retried as often as its class allows."""


def failure_class(error: BaseException) -> FailureClass:
    """The class of a stage's failure, or of a storage failure in the flow's own process."""
    if isinstance(error, StageError):
        return _CLASS_BY_CAUSE.get(error.cause, "permanent")
    if isinstance(error, StorageUnavailableError | ConnectionError | TimeoutError):
        return "storage"
    return "permanent"


def is_retried(error: BaseException, earlier: int) -> bool:
    """Whether a stage that failed like this, after `earlier` failures of the same class, gets another attempt."""
    return earlier < RETRIES[failure_class(error)]


def stopped(error: BaseException, label: str, earlier: int) -> StageStoppedError:
    """The error that ends the run, saying what was tried and where to look."""
    failure = failure_class(error)
    tried = f"after {earlier + 1} attempts that failed in this way" if RETRIES[failure] else "which no retry can cure"
    return StageStoppedError(f"{label} stopped ({failure}), {tried}: {error}")
