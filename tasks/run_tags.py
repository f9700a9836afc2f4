"""What a run's tags in MLflow say of where it runs and of which revision of this code."""

from __future__ import annotations

from prefect import runtime
from prefect.context import FlowRunContext

from forge_core.software import git_revision


def run_tags() -> dict[str, str]:
    """Tags of the flow run that is going on: ids and names of Prefect, and the commit; without one the commit alone."""
    tags: dict[str, str | None] = {}
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        tags["prefect.flow_run_id"] = str(context.flow_run.id)
        tags["prefect.flow_run_name"] = context.flow_run.name
        tags["prefect.work_pool"] = context.flow_run.work_pool_name
        tags["prefect.deployment"] = runtime.deployment.name if context.flow_run.deployment_id else None
    if (revision := git_revision()) is not None:
        tags["mlflow.source.git.commit"], is_changed = revision
        tags["forge.git_is_changed"] = str(is_changed).lower()
    return {name: value for name, value in tags.items() if value}
