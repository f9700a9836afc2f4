"""Opening a run: its plan is checked, its tracker and stage processes live exactly as long as the block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from prefect import runtime
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from forge_core.config import RunConfig
from forge_core.plan import Plan
from forge_core.runs import write_run
from tasks.placement import Placement
from tasks.processes import Log, stage_processes
from tasks.run_tags import run_tags
from tasks.tracking import Tracker, tracking


@dataclass(frozen=True)
class Run:
    """One run of a flow: what it will do, and where it says what it has done."""

    plan: Plan
    tracker: Tracker
    logger: Log


@contextmanager
def open_run(config: RunConfig, run_id: str | None) -> Iterator[Run]:
    """Check the config, start stage processes and tracking, and end both with the block.

    Without a `run_id` the run is named after its Prefect flow run, so that a retry continues it. Raises ValueError for
    a setting that cannot work, before any process starts.
    """
    logger = get_run_logger()
    plan = Plan(config, run_id or _default_run_id())
    plan.check()
    write_run(plan.run_uri, plan.run_id, config)
    logger.info("run %s -> %s", plan.run_id, plan.run_uri)
    with (
        stage_processes(config, logger) as processes,
        tracking(plan, run_tags(), logger) as tracker,
    ):
        try:
            yield Run(plan, tracker, logger)
        finally:
            _report(processes.placement, tracker, logger)


def _default_run_id() -> str:
    flow_run_id = runtime.flow_run.id
    return f"run-{str(flow_run_id)[:8]}" if flow_run_id else f"run-{datetime.now():%Y%m%d-%H%M%S}"


def _report(placement: Placement, tracker: Tracker, logger: Log) -> None:
    """Say where the stages went that went elsewhere: a page of the flow run, and a number for each attempt of it."""
    if placement.last is not None:
        waited = sum(float(row["seconds waited"]) for row in placement.rows)
        numbers = {"placement/redirects": placement.redirects, "placement/queue_seconds": waited}
        tracker.record_numbers(numbers, runtime.flow_run.run_count or 0, placement.last)
    if placement.rows:
        description = f"stages in other pools, {placement.redirects} redirects"
        try:
            create_table_artifact(placement.rows, key="placement", description=description)
        except Exception as error:
            logger.warning("the page of placed stages is not in the Prefect UI: %s", error)
