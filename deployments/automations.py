"""Prefect automations: a run whose worker was lost is marked Crashed, so that it can be retried.

    make automations        on the server of PREFECT_API_URL; again: brought up to date

A process that is killed says nothing. Its run sends a heartbeat every 30 s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY, which
the work pools set), and the server waits for the next one. Only runs with the tag `forge` are looked at.
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

HEARTBEAT_SECONDS = 30
PENDING_SECONDS = 1800  # a cold node pulls a large image in the meantime
_STARTED = ("Running", "Completed", "Failed", "Crashed", "Cancelling", "Cancelled", "Paused", "Late", "Scheduled")

_RUNS = ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]})


def automations(silent_seconds: float = 3 * HEARTBEAT_SECONDS, tag: str = "forge") -> list[AutomationCore]:
    """What is applied, for the runs with a tag."""
    ours = ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{tag}"], "prefect.resource.role": ["tag"]})

    def silence(after: set[str], expect: set[str], seconds: float) -> EventTrigger:
        return EventTrigger(
            match=_RUNS,
            match_related=ours,
            for_each={"prefect.resource.id"},
            after=after,
            expect=expect,
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        )

    return [
        AutomationCore(
            name=f"{tag}: mark silent runs as crashed",
            description=f"A run that gave no sign of life for {silent_seconds:g} s has lost its process.",
            # `Running` as well: a run killed before its first heartbeat would otherwise never be missed.
            trigger=silence(
                {"prefect.flow-run.heartbeat", "prefect.flow-run.Running"}, {"prefect.flow-run.*"}, silent_seconds
            ),
            actions=[_crash(f"no heartbeat for {silent_seconds:g} s: its process or its machine is gone")],
        ),
        AutomationCore(
            name=f"{tag}: mark stranded runs as crashed",
            description="A run that was taken by a worker and never started keeps its deployment's place for ever.",
            trigger=silence(
                {"prefect.flow-run.Pending"}, {f"prefect.flow-run.{name}" for name in _STARTED}, PENDING_SECONDS
            ),
            actions=[_crash(f"did not start within {PENDING_SECONDS} s of being taken by a worker")],
        ),
    ]


def apply(wanted: list[AutomationCore]) -> dict[str, str]:
    """Create these automations, or bring those of the same name up to date; returns which of the two, by name."""
    done = {}
    with get_client(sync_client=True) as client:
        for automation in wanted:
            found = client.read_automations_by_name(automation.name)
            if found:
                client.update_automation(found[0].id, automation)
            else:
                client.create_automation(automation)
            done[automation.name] = "updated" if found else "created"
    return done


def _crash(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=message)


if __name__ == "__main__":
    for name, outcome in apply(automations()).items():
        print(f"{outcome} automation {name!r}")
