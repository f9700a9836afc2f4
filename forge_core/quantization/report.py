"""The report of a quantization, for people: a table of the layers, and a plot of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forge_core.quantize_config import QuantizeConfig
from forge_core.settings import Settings


class LayerRow(Settings):
    """What is known of one layer that could be quantized."""

    name: str
    low: float
    high: float
    std: float
    span_sigmas: float
    is_flagged: bool
    is_remedied: bool
    is_kept: bool
    sqnr_db: float | None
    mae: float | None
    drift: float | None


def as_markdown(rows: Sequence[LayerRow], summary: dict[str, float | int], config: QuantizeConfig) -> str:
    """The report as Markdown; layers with the largest relative error first."""
    lines = [
        f"# Quantized as {config.scheme.name}, weights per {config.scheme.weights_per}",
        "",
        "![signal-to-noise ratio by layer](layers.png)",
        "",
        "| metric | value |",
        "| --- | --- |",
        *(f"| {name} | {value:.5g} |" for name, value in sorted(summary.items())),
        "",
        f"Flagged: inputs span over {config.calibration.flag_sigmas:g} standard deviations. Remedy: {config.remedy}.",
        "",
        "| layer | SQNR, dB | MAE | inputs from | to | span, sigmas | drift | state |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row.sqnr_db is None, row.sqnr_db or 0.0)):
        numbers = (row.sqnr_db, row.mae, row.low, row.high, row.span_sigmas, row.drift)
        cells = " | ".join("" if number is None else f"{number:.4g}" for number in numbers)
        lines.append(f"| {row.name} | {cells} | {_state(row)} |")
    return "\n".join(lines) + "\n"


def _state(row: LayerRow) -> str:
    claims = {"flagged": row.is_flagged, "remedied": row.is_remedied, "kept in high precision": row.is_kept}
    return ", ".join(claim for claim, holds in claims.items() if holds)


def plot(rows: Sequence[LayerRow], path: Path) -> None:
    """Write a PNG: signal-to-quantization-noise ratio of each layer's outputs, in the order of the policy."""
    # Imported here: it takes a second, and the report as text does without it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.sqnr_db is not None]
    figure = Figure(figsize=(8, max(2.0, 0.18 * len(measured))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = ["tab:red" if row.is_flagged else "tab:blue" for row in measured]
    axes.barh(
        [row.name.removeprefix("model.layers.") for row in measured],
        [row.sqnr_db or 0.0 for row in measured],
        color=colours,
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("signal-to-noise ratio of the outputs, dB (red: flagged)")
    figure.savefig(path, dpi=120)
