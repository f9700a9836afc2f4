"""Flow `stage`: one stage of another run, on the machine of a work pool.

`make stages POOLS="spot reserved"` creates its deployments; `placement` in the config of a run sends stages there.
"""

from __future__ import annotations

from prefect import flow
from prefect.logging import get_run_logger
from prefect.states import Failed, State
from pydantic import JsonValue

from forge_core.jobs import parse_job
from forge_core.stages.process import StageError
from forge_core.stages.workspace import committed
from tasks.failures import failure_class
from tasks.processes import run_alone


@flow(name="stage", persist_result=False)
def stage(job: dict[str, JsonValue], digest: str, time_limit_seconds: float) -> dict[str, JsonValue] | State:
    """Make the output of a job unless it is committed; returns its reference.

    `digest` is that of the job where it was planned, which depends on the versions of the software there. A failure
    ends the run in a state that is named after its cause, by which the other run decides what to do.
    """
    parsed = parse_job(job)
    if parsed.digest() != digest:
        raise ValueError(
            f"the job {parsed.label} is another one here, where its stage is made by {parsed.software}; install the "
            "versions of the machine that sent it"
        )
    try:
        manifest = committed(parsed) or run_alone(parsed, time_limit_seconds, get_run_logger())
    except StageError as error:
        message = str(error).removeprefix(f"stage {error.stage} failed ({error.cause}): ")
        return Failed(name=error.cause, message=message)
    except Exception as error:
        if failure_class(error) != "storage":
            raise
        return Failed(name="StorageUnavailable", message=str(error))
    return manifest.ref.model_dump(mode="json")
