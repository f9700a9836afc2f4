"""Stored evaluation reports: read back, and two of them compared problem by problem."""

from __future__ import annotations

import json

from forge_core.artifacts import ArtifactError, Manifest
from forge_core.comparison import PairedDifference, paired_difference
from forge_core.manifests import file_reader


def right_by_problem(evaluation: Manifest) -> dict[str, float]:
    """1 or 0 for each problem of an evaluation, by id: whether the greedy answer was right."""
    rows = [json.loads(line) for line in file_reader(evaluation, "samples.jsonl")().splitlines()]
    found = {str(row["id"]): float(row["is_right"]) for row in rows}
    if len(found) != len(rows):
        raise ArtifactError(
            f"{evaluation.uri} has {len(rows)} problems with {len(found)} different ids; they must differ"
        )
    return found


def compare(a: Manifest, b: Manifest) -> PairedDifference:
    """Greedy accuracy of b minus that of a, on the same problems.

    Raises ValueError when they do not have the same problems: their difference would be one of problems as well.
    """
    first, second = right_by_problem(a), right_by_problem(b)
    if first.keys() != second.keys():
        raise ValueError(
            f"{a.uri} and {b.uri} do not have the same problems: {len(first.keys() - second.keys())} and "
            f"{len(second.keys() - first.keys())} are in one alone, {len(first.keys() & second.keys())} in both; "
            "evaluate both policies with the same dataset and num_examples"
        )
    return paired_difference(list(first.values()), [second[problem] for problem in first])
