"""Accuracy by difficulty, for datasets whose examples say how hard they are in `metadata.difficulty`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from forge_core.estimates import wilson_interval
from forge_core.graded import GradedProblem, Metrics
from forge_core.settings import Settings

MAX_VALUES = 8  # of more different numbers quartiles are made
MAX_BINS = 20
UNKNOWN = "unknown"


class DifficultyBin(Settings):
    """The problems of one difficulty, or of one quarter of all."""

    label: str = Field(description="In metric names: the value, or q1 (easiest numbers) to q4")
    low: float | str | None = Field(description="Smallest difficulty in the bin, None when it is not given")
    high: float | str | None = Field(description="Largest difficulty in the bin")
    num_examples: int
    accuracy: float = Field(description="Greedy")
    accuracy_low: float
    accuracy_high: float
    pass_at_1: float = Field(description="Share of samples that are right")

    @property
    def metrics(self) -> Metrics:
        """Under their names below `eval/{name}/`."""
        fields = ("num_examples", "accuracy", "accuracy_low", "accuracy_high", "pass_at_1")
        return {f"difficulty/{self.label}/{field}": getattr(self, field) for field in fields}


def by_difficulty(problems: Sequence[GradedProblem]) -> tuple[DifficultyBin, ...]:
    """A bin for each value, or quartiles of more than 8 different numbers; none when no example has a difficulty.

    Raises ValueError for more than 20 different texts: those are no grades.
    """
    grades = [_grade(problem) for problem in problems]
    known = sorted({grade for grade in grades if grade is not None}, key=lambda grade: (isinstance(grade, str), grade))
    if not known:
        return ()
    numbers = [grade for grade in grades if isinstance(grade, float)]
    if len(known) > MAX_VALUES and not any(isinstance(grade, str) for grade in known):
        edges = np.quantile(numbers, [0.25, 0.5, 0.75])
        # A value on an edge belongs to the lower quarter, so equal values are never in two of them.
        labels = {grade: f"q{np.searchsorted(edges, grade, side='left') + 1}" for grade in known}
    elif len(known) > MAX_BINS:
        raise ValueError(
            f"metadata.difficulty has {len(known)} different texts (e.g. {known[0]!r}); give it grades or numbers"
        )
    else:
        labels = dict(zip(known, _distinct([_label(grade) for grade in known]), strict=True))
    bins: dict[str, list[tuple[float | str | None, GradedProblem]]] = {label: [] for label in labels.values()}
    for grade, problem in zip(grades, problems, strict=True):
        bins.setdefault(UNKNOWN if grade is None else labels[grade], []).append((grade, problem))
    return tuple(_bin(label, members) for label, members in bins.items())


def _grade(problem: GradedProblem) -> float | str | None:
    """Numbers as numbers, also where they are written as texts; None for what is neither number nor text."""
    value = problem.difficulty
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return str(value)
    return number if np.isfinite(number) else None


def _label(grade: float | str) -> str:
    text = f"{grade:g}" if isinstance(grade, float) else grade
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_") or "_"


def _distinct(labels: Sequence[str]) -> list[str]:
    """Labels that became equal to another one, or to that of unknown difficulty, get their place as well."""
    taken = {UNKNOWN}
    return [
        label if labels.count(label) == 1 and label not in taken else f"{label}_{place}"
        for place, label in enumerate(labels)
    ]


def _bin(label: str, members: Sequence[tuple[float | str | None, GradedProblem]]) -> DifficultyBin:
    grades = [grade for grade, _ in members if grade is not None]  # equal ones, or the numbers of a quarter
    problems = [problem for _, problem in members]
    low, high = wilson_interval(sum(one.is_right for one in problems), len(problems))
    return DifficultyBin(
        label=label,
        low=min(grades, default=None),
        high=max(grades, default=None),
        num_examples=len(problems),
        accuracy=statistics.fmean(one.is_right for one in problems),
        accuracy_low=low,
        accuracy_high=high,
        pass_at_1=statistics.fmean(one.num_right / len(one.samples) for one in problems),
    )
