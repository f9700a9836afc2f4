"""A page in the Prefect UI that grows with the iterations of a run: curves, a table, and what was just sampled."""

from __future__ import annotations

import html
import logging
from collections.abc import Sequence
from uuid import UUID

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from forge_core.artifacts import Ref
from forge_core.plan import Plan
from forge_core.run_status import COLUMNS
from forge_core.samples import sample_completions
from tasks.processes import Log

BARS = "▁▂▃▄▅▆▇█"
NUM_SAMPLES = 6
MAX_CHARS = 300  # of a completion; what is cut is said
Numbers = dict[str, float | int]


class IterationReport:
    """The page of one run. A server that does not answer costs the page and nothing else."""

    def __init__(self, plan: Plan, num_iterations: int, logger: Log) -> None:
        self._plan, self._num_iterations, self._logger = plan, num_iterations, logger
        self._rows: list[Numbers] = []
        self._page: UUID | None = None
        self._progress: UUID | None = None

    def add(self, numbers: Numbers, scored: Ref, alarms: Sequence[str]) -> None:
        """Add an iteration with the numbers of its artifacts; `scored` is where the samples are taken from."""
        self._rows.append(numbers)
        try:
            self._show(scored, alarms)
        except Exception as error:
            self._logger.log(logging.WARNING, "the report of this iteration is not in the Prefect UI: %s", error)

    def _show(self, scored: Ref, alarms: Sequence[str]) -> None:
        markdown = page(self._plan, self._rows, sample_completions(scored, NUM_SAMPLES), alarms)
        percent = 100 * len(self._rows) / self._num_iterations
        if self._page is None or self._progress is None:
            description = f"iterations of {self._plan.run_id}"
            progress = create_progress_artifact(percent, description=description)
            created = create_markdown_artifact(markdown, key="iterations", description=description)
            assert isinstance(progress, UUID)  # not a coroutine: a flow's body is not async
            assert isinstance(created, UUID)
            self._page, self._progress = created, progress
            return
        update_progress_artifact(self._progress, percent)
        with get_client(sync_client=True) as client:
            client.update_artifact(self._page, ArtifactUpdate(data=markdown))


def page(plan: Plan, rows: Sequence[Numbers], samples: Sequence[dict], alarms: Sequence[str]) -> str:
    """The whole page as Markdown."""
    shown = {title: column for title, column in COLUMNS.items() if any(column[0] in row for row in rows)}
    curves = [
        f"| {title} | `{sparkline([row[name] for row in rows if name in row])}` | {_cell(rows[-1], name, form)} |"
        for title, (name, form) in shown.items()
    ]
    table = [
        f"| {number} | {' | '.join(_cell(row, name, form) for name, form in shown.values())} |"
        for number, row in reversed(list(enumerate(rows)))
    ]
    parts = [
        f"# {plan.config.name}: iteration {len(rows) - 1}",
        "\n".join(f"**ALARM** {sentence}  " for sentence in alarms),
        "\n".join(["| | from the first iteration to this one | now |", "| --- | --- | --- |", *curves]),
        "## Completions just sampled",
        "\n".join(["| prompt | completion | answer | rewards | advantage |", "| --- | --- | --- | --- | --- |"])
        + "\n"
        + "\n".join(_sample(one) for one in samples),
        "## Every iteration",
        "\n".join([f"| iteration | {' | '.join(shown)} |", f"| --- |{' --- |' * len(shown)}", *table]),
        f"Artifacts: `{plan.run_uri}`",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, the smallest lowest; values that are all equal have a flat line."""
    low, high = min(values), max(values)
    span = high - low
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1)) if span > 0 else 0] for value in values)


def _cell(row: Numbers, name: str, form: str) -> str:
    return format(row[name], form) if name in row else "-"


def _sample(row: dict) -> str:
    rewards = ", ".join(f"{name} {value:.2g}" for name, value in row["rewards"].items())
    cells = [row["prompt"], row["completion"], row["answer"] or "-"]
    return f"| {' | '.join(map(_code, cells))} | {rewards} | {row['advantage']:+.2f} |"


def _code(text: str) -> str:
    """Text of a model, which may be anything, as one cell of a table."""
    cut = text[:MAX_CHARS] + (f" … {len(text) - MAX_CHARS} more" if len(text) > MAX_CHARS else "")
    return f"<code>{html.escape(cut).replace('|', '&#124;').replace(chr(10), '⏎')}</code>" if cut else "(empty)"
