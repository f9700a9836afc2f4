"""Graded answers to problems, and the metrics of an evaluation that are made of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field, JsonValue

from forge_core.estimates import majority_vote, mean_interval, pass_at_k, powers_of_two, wilson_interval
from forge_core.settings import Settings

Metrics = dict[str, float | int]


class GradedCompletion(Settings):
    """One completion and what became of it."""

    completion: str
    is_right: bool = Field(description="Whether its reward is 1; what could not be scored is wrong")
    reward: float | None = Field(description="None: it could not be scored")
    extracted: str | None = Field(description="The answer in it, None when there is none or nobody can say")
    num_declared: int = Field(description="Different answers given in a box or after ####; more than 1 contradict")
    finish_reason: str
    num_tokens: int


class GradedProblem(GradedCompletion):
    """A problem: its greedy completion, and the samples. One line of samples.jsonl."""

    id: str
    answer: str | None
    difficulty: JsonValue = Field(None, description="metadata.difficulty of the example")
    samples: tuple[GradedCompletion, ...]

    @property
    def num_right(self) -> int:
        """Samples that are right."""
        return sum(sample.is_right for sample in self.samples)


def describe(problems: Sequence[GradedProblem], *, votes: bool) -> Metrics:
    """Metrics by name, without the `eval/{name}/` they are tracked under; `votes` asks for majority@k.

    Every mean is over all problems: what could not be scored is wrong, and no completion is left out.
    """
    low, high = wilson_interval(sum(one.is_right for one in problems), len(problems))
    samples = [sample for one in problems for sample in one.samples]
    found: Metrics = {
        "accuracy": statistics.fmean(one.is_right for one in problems),
        "accuracy_low": low,
        "accuracy_high": high,
    }
    found |= _pass_at(problems) | (_majority(problems) if votes else {})
    for prefix, completions in (("", problems), ("sampled_", samples)):
        found[f"{prefix}completion_length"] = statistics.fmean(one.num_tokens for one in completions)
        found[f"{prefix}truncated_fraction"] = _share([one.finish_reason == "length" for one in completions])
        found[f"{prefix}multi_answer_fraction"] = _share([one.num_declared > 1 for one in completions])
    distinct = sum(len({sample.completion for sample in one.samples}) for one in problems)
    return found | {
        "sampled_distinct_fraction": distinct / len(samples),
        "unscored": sum(one.reward is None for one in (*problems, *samples)),
        "num_examples": len(problems),
    }


def _pass_at(problems: Sequence[GradedProblem]) -> Metrics:
    num_samples = len(problems[0].samples)
    found: Metrics = {}
    for k in powers_of_two(num_samples):
        values = [pass_at_k(num_samples, one.num_right, k) for one in problems]
        # Of one sample, pass@1 has both names.
        names = ["pass_at_1"] * (k == 1) + [f"pass_at_{k}_of_{num_samples}"] * (k > 1 or num_samples == 1)
        for name in names:
            found |= _with_interval(name, values)
    return found


def _majority(problems: Sequence[GradedProblem]) -> Metrics:
    num_samples = len(problems[0].samples)
    votes = [
        majority_vote([sample.extracted for sample in one.samples], [sample.is_right for sample in one.samples])
        for one in problems
    ]
    return {
        **_with_interval(f"majority_at_{num_samples}", [vote.share_right for vote in votes]),
        "majority_tied_fraction": _share([vote.is_tied for vote in votes]),
        "majority_without_votes_fraction": _share([vote.num_votes == 0 for vote in votes]),
        "unparsable_fraction": 1 - sum(vote.num_votes for vote in votes) / (num_samples * len(votes)),
    }


def _with_interval(name: str, values: Sequence[float]) -> Metrics:
    low, high = mean_interval(values)
    return {name: statistics.fmean(values), f"{name}_low": low, f"{name}_high": high}


def _share(claims: Sequence[bool]) -> float:
    return statistics.fmean(claims)
