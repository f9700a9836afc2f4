"""`forge compare`: two policies problem by problem, and the curves of their runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from forge_core import storage
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.comparison import PairedDifference
from forge_core.evaluations import compare, setting_differences
from forge_core.run_status import COLUMNS, RunStatus, run_status
from forge_core.settings import Settings

CURVES = ("reward/mean", "completion/length/mean", "entropy/mean", "kl/reference", "logprob_gap/mean")


class Comparison(Settings):
    """Two runs side by side."""

    runs: tuple[str, str]
    policies: dict[str, tuple[str, str]] = Field(description="Versions compared, by evaluation")
    evaluations: dict[str, dict[str, PairedDifference]] = Field(
        description="By evaluation and metric: that of the second, b, minus that of the first, a, problem by problem"
    )
    settings: dict[str, tuple[str, ...]] = Field(description="Settings in which the two evaluations differ")
    problems: dict[str, str] = Field(description="Why an evaluation cannot be compared")
    curves: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = Field(description="Metrics by iteration")


def show(run: str, other: str, plot: Path, *, as_json: bool) -> None:
    """Print the comparison and write the plot; each side is a run, whose newest policy counts, or a policy version."""
    (first, version), (second, other_version) = _side(run), _side(other)
    found = comparison(first, second, versions=(version, other_version))
    draw(found, plot)
    if as_json:
        sys.stdout.write(found.model_dump_json(indent=1) + "\n")
        return
    console = Console()
    console.print(f"a  {found.runs[0]}\nb  {found.runs[1]}")
    console.print(_table(found))
    for name, differences in found.settings.items():
        console.print(f"{name}: a (there) and b (here) were evaluated with other settings: {', '.join(differences)}")
    for name, problem in found.problems.items():
        console.print(f"{name}: not compared, {problem}", style="yellow")
    if found.curves:
        console.print(_last_values(found))
    console.print(f"plot {plot}")


def comparison(
    first: RunStatus, second: RunStatus, *, versions: tuple[str | None, str | None] = (None, None)
) -> Comparison:
    """Evaluations that both have, paired, and the metrics of every iteration.

    `versions` are those of the policies; for None the newest one that has an evaluation of that name.
    """
    found = _evaluations(first, versions[0]), _evaluations(second, versions[1])
    evaluations, problems, policies, settings = {}, {}, {}, {}
    for name in sorted(found[0].keys() | found[1].keys()):
        if name not in found[0] or name not in found[1]:
            problems[name] = f"only {'a' if name in found[0] else 'b'} has it"
            continue
        (version, a), (other_version, b) = found[0][name], found[1][name]
        policies[name] = (version, other_version)
        try:
            evaluations[name] = compare(a, b)
        except (ValueError, ArtifactError) as error:
            problems[name] = str(error)
        if differences := setting_differences(a, b):
            settings[name] = tuple(differences)
    curves = {
        metric: values
        for metric in CURVES
        if first.run_uri != second.run_uri  # two policies of one run have the same curves
        and all(values := (_curve(first.iterations, metric), _curve(second.iterations, metric)))
    }
    return Comparison(
        runs=(first.run_uri, second.run_uri),
        policies=policies,
        evaluations=evaluations,
        settings=settings,
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
                heights = [getattr(one["accuracy"], mean) for one in found.evaluations.values()]
                axes.bar([x + 0.4 * place_in for x in range(len(heights))], heights, width=0.4, label=label)
            axes.set_xticks([x + 0.2 for x in range(len(found.evaluations))], list(found.evaluations))
            axes.set(title="greedy accuracy", ylim=(0, 1))
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _side(uri: str) -> tuple[RunStatus, str | None]:
    run, _, version = storage.absolute_uri(uri).partition("/policies/")
    return run_status(run), version or None


def _evaluations(status: RunStatus, asked: str | None) -> dict[str, tuple[str, Manifest]]:
    """Version and manifest of an evaluation of each name, of the newest policy or of the one asked for.

    A champion's from elsewhere do not count, nor do measurements of speed and of other harnesses.
    """
    found: dict[str, tuple[str, Manifest]] = {}
    for place in sorted(status.evaluations):
        version, _, name = place.partition("/")
        if version != asked if asked else not version.startswith("v"):
            continue
        manifest = read_manifest(f"{status.run_uri}/evals/{place}")
        if manifest is not None and manifest.job["stage"] == "evaluate":
            found[name] = (version, manifest)
    if asked and not found:
        raise ValueError(
            f"{status.run_uri} has no evaluation of {asked}; it has {', '.join(sorted(status.evaluations))}"
        )
    return found


def _table(found: Comparison) -> Table:
    table = Table(
        "evaluation", "metric", "a", "b", "b - a", "95 % interval", "better", "worse", "p", "problems", "",
        box=None, padding=(0, 1),
    )  # fmt: skip
    for name, metrics in found.evaluations.items():
        versions = found.policies[name]
        for metric, one in metrics.items():
            table.add_row(
                name,
                metric,
                f"{one.mean_a:.1%} ({versions[0]})",
                f"{one.mean_b:.1%} ({versions[1]})",
                f"{one.difference:+.1%}",
                f"{one.low:+.1%} to {one.high:+.1%}",
                str(one.num_better),
                str(one.num_worse),
                f"{one.p_value:.2g}",
                str(one.n),
                verdict(one.low, one.high),
            )
    return table


def _curve(iterations: Sequence[dict[str, float | int]], metric: str) -> tuple[float, ...]:
    return tuple(float(row[metric]) for row in iterations if metric in row)


def _last_values(found: Comparison) -> Table:
    forms = dict(COLUMNS.values())
    table = Table("metric, last iteration", "a", "b", box=None, padding=(0, 1))
    for metric, (first, second) in found.curves.items():
        table.add_row(metric, format(first[-1], forms[metric]), format(second[-1], forms[metric]))
    return table
