"""`forge status`: a run as a table."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forge_core.run_status import COLUMNS, RunStatus, run_status


def show(run: str, *, follow: bool, every: float, as_json: bool) -> None:
    """Print a run once, or again and again until it is done."""
    found = run_status(run)
    if as_json:
        while follow and not found.is_done:
            time.sleep(every)
            found = run_status(run)
        sys.stdout.write(found.model_dump_json(indent=1) + "\n")
        return
    if not follow:
        Console().print(page(found))
        return
    with Live(page(found), auto_refresh=False) as live:
        while not found.is_done:
            time.sleep(every)
            found = run_status(run)
            live.update(page(found), refresh=True)


def page(found: RunStatus) -> Group:
    """The head, the iterations and the evaluations of a run."""
    parts: list[Text | Table] = [_head(found)]
    if found.num_iterations:
        parts.append(_iterations(found))
    if found.evaluations:
        parts.append(_evaluations(found))
    return Group(*parts)


def _head(found: RunStatus) -> Text:
    lines = [f"{found.name}  {found.run_uri}", f"started {found.started_at[:19]} UTC"]
    if found.last_commit_at is not None:
        age = (datetime.now(UTC) - datetime.fromisoformat(found.last_commit_at)).total_seconds()
        lines[1] += f", last commit {found.last_artifact} {_ago(age)}"
    lines[1] += f", {found.num_done} of {found.num_iterations} iterations" if found.num_iterations else ""
    return Text("\n".join(lines))


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _iterations(found: RunStatus) -> Table:
    shown = {title: column for title, column in COLUMNS.items() if any(column[0] in row for row in found.iterations)}
    table = Table("iteration", *shown, title="iterations", title_justify="left", box=None, padding=(0, 1))
    for column in table.columns:
        column.justify = "right"
    for number, row in enumerate(found.iterations):
        cells = (format(row[name], form) if name in row else "-" for name, form in shown.values())
        table.add_row(str(number), *cells)
    return table


def _evaluations(found: RunStatus) -> Table:
    table = Table(
        "policy", "evaluation", "accuracy", "95 % interval", "problems", title="evaluations", title_justify="left",
        box=None, padding=(0, 1),
    )  # fmt: skip
    for place, numbers in sorted(found.evaluations.items()):
        version, _, name = place.partition("/")
        if f"eval/{name}/accuracy" not in numbers:  # of speed, or of another harness
            continue
        low, high = (numbers[f"eval/{name}/accuracy_{end}"] for end in ("low", "high"))
        table.add_row(
            version,
            name,
            f"{numbers[f'eval/{name}/accuracy']:.1%}",
            f"{low:.1%} to {high:.1%}",
            str(numbers[f"eval/{name}/num_examples"]),
        )
    return table
