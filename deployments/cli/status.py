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

WIDE = 110  # columns of a terminal that has room for the whole titles
SHORT_TITLES = {
    "truncated": "trunc",
    "groups to learn from": "groups",
    "clipped": "clip",
    "KL to reference": "KL",
    "log-prob gap": "gap",
    "gradient norm": "grad",
    "seconds": "s",
}


def show(run: str, *, follow: bool, every: float, as_json: bool) -> None:
    """Print a run once, or again and again until it is done."""
    found = run_status(run)
    if as_json:
        while follow and not found.is_done:
            time.sleep(every)
            found = run_status(run)
        sys.stdout.write(found.model_dump_json(indent=1) + "\n")
        return
    console = Console()
    if follow and not found.is_done:
        # What does not fit on the screen would be cut off below, where the newest iteration is.
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not found.is_done:
                live.update(page(found, width=console.width, height=console.height), refresh=True)
                time.sleep(every)
                found = run_status(run)
    console.print(page(found, width=console.width))


def page(found: RunStatus, *, width: int, height: int | None = None) -> Group:
    """The head, the iterations and the evaluations of a run; of the iterations the newest that fit in a height."""
    parts: list[Text | Table] = [_head(found)]
    if found.num_iterations:
        num_other_lines = 8 + (2 + len(found.evaluations) if found.evaluations else 0)
        parts.append(_iterations(found, width, max(3, height - num_other_lines) if height else None))
    if found.evaluations:
        parts.append(_evaluations(found))
    return Group(*parts)


def _head(found: RunStatus) -> Text:
    lines = [f"{found.name}  {found.run_uri}", f"started {found.started_at[:19]} UTC"]
    lines[1] += f", {found.num_done} of {found.num_iterations} iterations" if found.num_iterations else ""
    if found.last_commit_at is not None:
        age = (datetime.now(UTC) - datetime.fromisoformat(found.last_commit_at)).total_seconds()
        lines.append(f"last commit {found.last_artifact} {_ago(age)}")
    return Text("\n".join(lines))


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _iterations(found: RunStatus, width: int, max_rows: int | None) -> Table:
    shown = {title: column for title, column in COLUMNS.items() if any(column[0] in row for row in found.iterations)}
    is_narrow = width < WIDE
    titles = [SHORT_TITLES.get(title, title) for title in shown] if is_narrow else list(shown)
    first = max(0, len(found.iterations) - max_rows) if max_rows else 0
    name = f"iterations, {first} earlier ones not shown" if first else "iterations"
    table = Table(
        "" if is_narrow else "iteration", *titles, title=name, title_justify="left", box=None, padding=(0, 1),
        pad_edge=not is_narrow, collapse_padding=is_narrow,
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for number, row in list(enumerate(found.iterations))[first:]:
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
