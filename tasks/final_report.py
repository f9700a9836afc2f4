"""The report of a run where people look for it: beside its artifacts, in MLflow and as a page of the Prefect UI."""

from __future__ import annotations

import base64

from prefect.artifacts import create_markdown_artifact

from forge_core import final_report
from tasks.run import Run


def write_report(run: Run) -> None:
    """Write the report of a run that has come to its end; a failure costs the report and nothing else."""
    try:
        made = final_report.final_report(run.plan.run_uri)
        final_report.store(run.plan.run_uri, made)
        run.tracker.record_files({"report.md": made.markdown.encode(), "report.png": made.png})
        # Inside the page, since a browser cannot open what lies in a store.
        picture = f"data:image/png;base64,{base64.b64encode(made.png).decode()}"
        create_markdown_artifact(
            key="report",
            markdown=made.markdown.replace("(report.png)", f"({picture})"),
            description=f"{run.plan.config.name}, run {run.plan.run_id}",
        )
    except Exception as error:
        run.logger.warning("the report of this run is incomplete: %s: %s", type(error).__name__, error)
