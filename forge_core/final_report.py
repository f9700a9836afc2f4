"""The report of a run for people: what it has gained, and its curves. Read back from its manifests alone.

    {run}/report.md     evaluations before and after, the last numbers, seconds by stage
    {run}/report.png    the curves

Both are made anew from the manifests whenever a run ends, so they are plain files and no artifacts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_core import storage
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.evaluations import compare
from forge_core.manifests import file_reader
from forge_core.run_status import COLUMNS, RunStatus, run_status

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HISTORY = "history.jsonl"
PANEL_COLUMNS = 3
STAGES = ("rollout", "reference", "score", "update")  # of an iteration


@dataclass(frozen=True)
class FinalReport:
    """A run's report; `markdown` refers to the picture as report.png."""

    markdown: str
    png: bytes


@dataclass(frozen=True)
class Training:
    """The curves of a training on a fixed dataset."""

    stage: str
    lines: list[dict[str, float]]

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Optimizer steps and values of a metric."""
        points = [(line["step"], line[metric]) for line in self.lines if metric in line]
        return [step for step, _ in points], [value for _, value in points]


def final_report(run_uri: str) -> FinalReport:
    """The report of a run as far as it has come; raises ArtifactError when there is no such run."""
    status = run_status(run_uri)
    trainings = _trainings(status)
    return FinalReport(markdown=_markdown(status), png=_draw(status, trainings))


def store(run_uri: str, report: FinalReport) -> None:
    """Write the report beside the artifacts of its run, over an older one."""
    storage.write_atomic(f"{run_uri}/report.png", report.png)
    storage.write_atomic(f"{run_uri}/report.md", report.markdown.encode())


def _trainings(status: RunStatus) -> list[Training]:
    found = []
    for name in storage.list_names(f"{status.run_uri}/policies"):
        manifest = read_manifest(f"{status.run_uri}/policies/{name}")
        if manifest is not None and any(file.path == HISTORY for file in manifest.files):
            lines = [json.loads(line) for line in file_reader(manifest, HISTORY)().splitlines()]
            found.append(Training(str(manifest.job["stage"]), lines))
    return found


def _markdown(status: RunStatus) -> str:
    parts = [f"# {status.name}: {status.run_uri.rpartition('/')[2]}"]
    if rows := _before_and_after(status):
        head = "| evaluation | before | after | difference | 95 % interval | problems | |"
        parts += ["## Before and after", "\n".join([head, "|" + " --- |" * 7, *rows])]
    parts.append("![curves](report.png)")
    if status.iterations:
        shown = [(title, *column) for title, column in COLUMNS.items() if column[0] in status.iterations[-1]]
        first, last = status.iterations[0], status.iterations[-1]
        rows = [
            f"| {title} | {format(first[name], form) if name in first else '-'} | {format(last[name], form)} |"
            for title, name, form in shown
        ]
        head = f"| | iteration 0 | iteration {len(status.iterations) - 1} |"
        parts += ["## Iterations", "\n".join([head, "|" + " --- |" * 3, *rows])]
        parts += ["## Seconds by stage", _seconds(status)]
    return "\n\n".join([*parts, f"Artifacts: `{status.run_uri}`"]) + "\n"


def _before_and_after(status: RunStatus) -> list[str]:
    """A row for each evaluation that the first and the last evaluated policy of the run have."""
    versions: dict[str, list[str]] = {}
    for place in sorted(status.evaluations):
        version, _, name = place.partition("/")
        if version.startswith("v"):  # else a champion's
            versions.setdefault(name, []).append(version)
    rows = []
    for name, evaluated in versions.items():
        ends = [read_manifest(f"{status.run_uri}/evals/{version}/{name}") for version in (evaluated[0], evaluated[-1])]
        rows.append(_row(name, (evaluated[0], evaluated[-1]), [one for one in ends if one is not None]))
    return rows


def _row(name: str, versions: tuple[str, str], ends: Sequence[Manifest]) -> str:
    accuracies = [f"{one.summary[f'eval/{name}/accuracy']:.1%}" for one in ends]
    cells = [name, *(f"{accuracy} ({version})" for accuracy, version in zip(accuracies, versions, strict=True))]
    if versions[0] == versions[1]:
        return f"| {' | '.join(cells)} | - | - | {ends[0].summary[f'eval/{name}/num_examples']} | evaluated once |"
    try:
        found = compare(ends[0], ends[1])["accuracy"]
    except (ArtifactError, ValueError) as error:
        return f"| {' | '.join(cells)} | - | - | - | not compared: {error} |"
    verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "not distinguishable"
    cells += [f"{found.difference:+.1%}", f"{found.low:+.1%} to {found.high:+.1%}", str(found.n), verdict]
    return f"| {' | '.join(cells)} |"


def _seconds(status: RunStatus) -> str:
    totals = {stage: sum(row.get(f"time/{stage}_seconds", 0.0) for row in status.iterations) for stage in STAGES}
    whole = sum(totals.values())
    rows = [f"| {stage} | {total:.1f} | {total / whole:.0%} |" for stage, total in totals.items() if total > 0]
    return "\n".join(["| stage | seconds | share |", "|" + " --- |" * 3, *rows])


def _draw(status: RunStatus, trainings: Sequence[Training]) -> bytes:
    """One panel for each curve that the run has, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    hidden = {"groups to learn from", "truncated", "clipped", "seconds"}
    titles = [title for title, (name, _) in COLUMNS.items() if any(name in row for row in status.iterations)]
    curves = [title for title in titles if title not in hidden]
    count = len(trainings) + len(curves) + bool(status.iterations) + bool(status.evaluations)
    num_rows = max(1, -(-count // PANEL_COLUMNS))
    figure = Figure(figsize=(4.0 * PANEL_COLUMNS, 2.9 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = iter(figure.add_subplot(num_rows, PANEL_COLUMNS, place + 1) for place in range(count))
    if status.evaluations:
        _draw_accuracy(next(panels), status)
    for title in curves:
        _draw_curve(next(panels), status, title)
    if status.iterations:
        _draw_seconds(next(panels), status)
    for training in trainings:
        _draw_training(next(panels), training)
    figure.suptitle(f"{status.name}  {status.run_uri.rpartition('/')[2]}")
    target = io.BytesIO()
    figure.savefig(target, dpi=100, format="png")
    return target.getvalue()


def _draw_curve(axes: Axes, status: RunStatus, title: str) -> None:
    name = COLUMNS[title][0]
    points = [(iteration, row[name]) for iteration, row in enumerate(status.iterations) if name in row]
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
    axes.set(title=title, xlabel="iteration")
    axes.locator_params("x", integer=True)
    axes.grid(alpha=0.3)


def _draw_seconds(axes: Axes, status: RunStatus) -> None:
    below = [0.0] * len(status.iterations)
    for stage in STAGES:
        heights = [row.get(f"time/{stage}_seconds", 0.0) for row in status.iterations]
        if any(heights):
            axes.bar(range(len(heights)), heights, bottom=below, label=stage)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(title="seconds by stage", xlabel="iteration")
    axes.locator_params("x", integer=True)
    axes.set_ylim(0, 1.2 * max(below) or 1)  # room for the legend
    axes.legend(fontsize=7, ncols=len(STAGES), loc="upper center")


def _draw_accuracy(axes: Axes, status: RunStatus) -> None:
    points: dict[str, list[tuple[str, float, float, float]]] = {}
    for place, numbers in sorted(status.evaluations.items()):
        version, _, name = place.partition("/")
        if version.startswith("v"):
            mean, low, high = (numbers[f"eval/{name}/accuracy{end}"] for end in ("", "_low", "_high"))
            points.setdefault(name, []).append((version, mean, mean - low, high - mean))
    for name, found in points.items():
        versions, means, below, above = zip(*found, strict=True)
        axes.errorbar(versions, means, yerr=(below, above), marker="o", capsize=3, label=name)
    axes.set(title="greedy accuracy, 95 % interval", xlabel="policy", ylim=(0, 1))
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _draw_training(axes: Axes, training: Training) -> None:
    for label, metric, style in (("training", "loss/policy", "-"), ("validation", "validation/loss", "o-")):
        steps, values = training.curve(metric)
        if steps:
            axes.plot(steps, values, style, markersize=3, label=label)
    axes.set(title=f"{training.stage} loss", xlabel="optimizer step")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
