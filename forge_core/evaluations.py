"""Stored evaluations: what is in their report, and two of them compared problem by problem."""

from __future__ import annotations

import json

from pydantic import Field

from forge_core.artifacts import ArtifactError, Manifest
from forge_core.comparison import PairedDifference, paired_difference
from forge_core.data_config import ChatConfig
from forge_core.differences import field_differences
from forge_core.difficulty import DifficultyBin
from forge_core.estimates import majority_vote
from forge_core.graded import Metrics
from forge_core.manifests import file_reader
from forge_core.sampling_config import SamplingConfig
from forge_core.settings import FunctionConfig, Settings

MAX_NAMED = 3


class EvaluationReport(Settings):
    """`report.json`: what an evaluation has measured, and how."""

    name: str
    policy: str = Field(description="Digest of the policy version")
    dataset: str = Field(description="Digest of the dataset")
    num_examples: int
    greedy: SamplingConfig = Field(description="How the answer is made that accuracy is about")
    sampled: SamplingConfig = Field(description="How the samples of pass@k and majority@k are made")
    num_samples: int = Field(description="Samples per problem")
    seed: int
    chat: ChatConfig
    reward: FunctionConfig
    extractor: str | None = Field(description="The function that says what the reward takes for the answer")
    metrics: Metrics = Field(description="By name, without the eval/{name}/ they are tracked under")
    difficulty: tuple[DifficultyBin, ...] = Field(description="None when no example has metadata.difficulty")
    notes: tuple[str, ...] = Field(description="What is not there, and why")


def compare(a: Manifest, b: Manifest) -> dict[str, PairedDifference]:
    """Paired differences of two evaluations, those of b minus those of a, by metric.

    `accuracy` is greedy; `pass_at_1` and `majority` are there when both evaluations have samples, and votes.
    Problems are matched by id. Raises ValueError when the two do not have the same problems, or other right answers to
    them: the difference would be one of problems as well.
    """
    first, second = _rows(a), _rows(b)
    _require_same_problems(first, second, a, b)
    scores = [{problem: _scores(row) for problem, row in rows.items()} for rows in (first, second)]
    metrics = ["accuracy"]
    metrics += ["pass_at_1"] * all("pass_at_1" in found for side in scores for found in side.values())
    metrics += ["majority"] * all(any("/majority_at_" in name for name in one.summary) for one in (a, b))
    return {
        name: paired_difference(*([side[problem][name] for problem in first] for side in scores)) for name in metrics
    }


def setting_differences(a: Manifest, b: Manifest) -> list[str]:
    """Settings in which two evaluations differ, such as "evaluation.max_tokens (16 there, 32 here)"; there is a."""
    jobs = [{name: one.job.get(name) for name in ("evaluation", "chat")} for one in (a, b)]
    return [str(difference) for difference in field_differences(*jobs)]


def _scores(row: dict) -> dict[str, float]:
    """Scores of one problem in [0, 1]."""
    found = {"accuracy": float(row["is_right"])}
    if samples := row.get("samples"):
        are_right = [sample["is_right"] for sample in samples]
        found["pass_at_1"] = sum(are_right) / len(are_right)
        found["majority"] = majority_vote([sample["extracted"] for sample in samples], are_right).share_right
    return found


def _rows(evaluation: Manifest) -> dict[str, dict]:
    """The lines of an evaluation by the id of their problem, sorted by it."""
    rows = [json.loads(line) for line in file_reader(evaluation, "samples.jsonl")().splitlines()]
    found = {str(row["id"]): row for row in sorted(rows, key=lambda row: str(row["id"]))}
    if len(found) != len(rows):
        raise ArtifactError(
            f"{evaluation.uri} has {len(rows)} problems with {len(found)} different ids; they must differ"
        )
    return found


def _require_same_problems(first: dict[str, dict], second: dict[str, dict], a: Manifest, b: Manifest) -> None:
    if first.keys() != second.keys():
        raise ValueError(
            f"{a.uri} and {b.uri} do not have the same problems: {len(first.keys() - second.keys())} and "
            f"{len(second.keys() - first.keys())} are in one alone, {len(first.keys() & second.keys())} in both "
            f"(e.g. {', '.join(sorted(first.keys() ^ second.keys())[:MAX_NAMED])}); "
            "evaluate both policies with the same dataset and num_examples"
        )
    changed = [problem for problem in first if first[problem].get("answer") != second[problem].get("answer")]
    if changed:
        raise ValueError(
            f"{len(changed)} of {len(first)} problems have another answer in {b.uri} than in {a.uri} "
            f"(e.g. {', '.join(changed[:MAX_NAMED])}); evaluate both policies with the same dataset"
        )
