"""`forge compare`: two runs, their newest policies problem by problem and their curves side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from forge_core.artifacts import Manifest, read_manifest
from forge_core.evaluations import compare
from forge_core.run_status import COLUMNS, RunStatus, run_status
from forge_core.settings import Settings

CURVES = ("reward/mean", "completion/length/mean", "entropy/mean", "kl/reference", "logprob_gap/mean")


class Comparison(Settings):
    """Two runs side by side."""

    runs: tuple[str, str]
    policies: dict[str, tuple[str, str]] = Field(description="Versions compared, by evaluation")
    evaluations: dict[str, dict[str, float | int]] = Field(
        description="Greedy accuracy by evaluation: that of the second run, b, minus that of the first, a"
    )
    problems: dict[str, str] = Field(description="Why an evaluation cannot be compared")
    curves: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = Field(description="Metrics by iteration")


def show(run: str, other: str, plot: Path, *, as_json: bool) -> None:
    """Print the comparison and write the plot."""
    found = comparison(run_status(run), run_status(other))
    draw(found, plot)
    if as_json:
        sys.stdout.write(found.model_dump_json(indent=1) + "\n")
        return
    console = Console()
    console.print(f"a  {found.runs[0]}\nb  {found.runs[1]}")
    table = Table("evaluation", "a", "b", "b - a", "95 % interval", "problems", "", box=None, padding=(0, 1))
    for name, one in found.evaluations.items():
        versions = found.policies[name]
        table.add_row(
            name,
            f"{one['mean_a']:.1%} ({versions[0]})",
            f"{one['mean_b']:.1%} ({versions[1]})",
            f"{one['difference']:+.1%}",
            f"{one['low']:+.1%} to {one['high']:+.1%}",
            str(one["n"]),
            verdict(one["low"], one["high"]),
        )
    console.print(table)
    for name, problem in found.problems.items():
        console.print(f"{name}: not compared, {problem}", style="yellow")
    if found.curves:
        console.print(_last_values(found))
    console.print(f"plot {plot}")


def comparison(first: RunStatus, second: RunStatus) -> Comparison:
    """Evaluations of the newest policies that both have, paired, and the metrics of every iteration."""
    newest = _newest_evaluations(first), _newest_evaluations(second)
    evaluations, problems, policies = {}, {}, {}
    for name in sorted(newest[0].keys() | newest[1].keys()):
        if name not in newest[0] or name not in newest[1]:
            problems[name] = f"only {'a' if name in newest[0] else 'b'} has it"
            continue
        policies[name] = (newest[0][name][0], newest[1][name][0])
        try:
            evaluations[name] = compare(newest[0][name][1], newest[1][name][1]).model_dump()
        except ValueError as error:
            problems[name] = str(error)
    curves = {
        metric: values
        for metric in CURVES
        if all(values := (_curve(first.iterations, metric), _curve(second.iterations, metric)))
    }
    return Comparison(
        runs=(first.run_uri, second.run_uri),
        policies=policies,
        evaluations=evaluations,
        problems=problems,
        curves=curves,
    )


def verdict(low: float, high: float) -> str:
    """What the interval of a difference says in words."""
    if low > 0:
        return "b is better"
    return "a is better" if high < 0 else "not distinguishable"


def draw(found: Comparison, path: Path) -> None:
    """One panel for each metric and one for the accuracies, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = {metric: title for title, (metric, _) in COLUMNS.items()}
    panels = [*found.curves, *(["accuracy"] if found.evaluations else [])]
    if not panels:
        raise ValueError(f"{found.runs[0]} and {found.runs[1]} have no metric and no evaluation in common yet")
    figure = Figure(figsize=(3.6 * len(panels), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    labels = [run.rpartition("/")[2] for run in found.runs]
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), place)
        if panel in found.curves:
            for label, values in zip(labels, found.curves[panel], strict=True):
                axes.plot(range(len(values)), values, marker="o", markersize=3, label=label)
            axes.set(title=titles[panel], xlabel="iteration")
        else:
            for place_in, (label, mean) in enumerate(zip(labels, ("mean_a", "mean_b"), strict=True)):
                heights = [one[mean] for one in found.evaluations.values()]
                axes.bar([x + 0.4 * place_in for x in range(len(heights))], heights, width=0.4, label=label)
            axes.set_xticks([x + 0.2 for x in range(len(found.evaluations))], list(found.evaluations))
            axes.set(title="greedy accuracy of the newest policy", ylim=(0, 1))
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _newest_evaluations(status: RunStatus) -> dict[str, tuple[str, Manifest]]:
    """Version and manifest of the newest evaluation of each name; a champion's from elsewhere do not count."""
    found: dict[str, tuple[str, Manifest]] = {}
    for place in sorted(status.evaluations):
        version, _, name = place.partition("/")
        manifest = read_manifest(f"{status.run_uri}/evals/{place}") if version.startswith("v") else None
        if manifest is not None:
            found[name] = (version, manifest)
    return found


def _curve(iterations: Sequence[dict[str, float | int]], metric: str) -> tuple[float, ...]:
    return tuple(float(row[metric]) for row in iterations if metric in row)


def _last_values(found: Comparison) -> Table:
    forms = dict(COLUMNS.values())
    table = Table("metric, last iteration", "a", "b", box=None, padding=(0, 1))
    for metric, (first, second) in found.curves.items():
        table.add_row(metric, format(first[-1], forms[metric]), format(second[-1], forms[metric]))
    return table
