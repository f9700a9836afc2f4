"""Which held-out problems a training set holds too: their scores say what was learned by heart.

exact: the same prompt but for case, spaces and the form of its characters. near: another prompt with the same run of
13 words, as in GPT-3 (arXiv:2005.14165, appendix C). A run of words that several held-out problems share is a turn of
phrase of their source and tells none of them apart, so it does not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Problem:
    """An example, as far as its prompt goes: what the user says."""

    id: str
    prompt: str

    @classmethod
    def of(cls, row: Mapping) -> Problem:
        """The problem of a stored example; system prompts, which whole datasets share, are left out."""
        turns = row["messages"]
        last = len(turns) - 1 if turns and turns[-1]["role"] == "assistant" else len(turns)
        return cls(row["id"], "\n".join(turn["content"] for turn in turns[:last] if turn["role"] != "system"))


@dataclass(frozen=True)
class Found:
    """A held-out problem and the first training example that gives it away."""

    held_out_id: str
    training_id: str
    how: Literal["exact", "near"]


def find_overlap(training: Iterable[Problem], held_out: Sequence[Problem], *, num_words: int) -> list[Found]:
    """The held-out problems that are in training, in their order; `num_words` of 0 looks for exact ones alone.

    `training` is read once and never held in memory.
    """
    by_key: dict[str, list[int]] = {}
    by_run: dict[str, int | None] = {}  # None for a run of words of several problems
    keys = [normalised(problem.prompt) for problem in held_out]
    for place, problem in enumerate(held_out):
        by_key.setdefault(keys[place], []).append(place)
        for run in set(runs_of_words(problem.prompt, num_words)):
            owner = by_run.setdefault(run, place)
            if owner is not None and keys[owner] != keys[place]:
                by_run[run] = None
    exact: dict[int, str] = {}
    near: dict[int, str] = {}
    for problem in training:
        for place in by_key.get(normalised(problem.prompt), ()):
            exact.setdefault(place, problem.id)
        for run in runs_of_words(problem.prompt, num_words):
            if (owner := by_run.get(run)) is not None:
                for place in by_key[keys[owner]]:
                    near.setdefault(place, problem.id)
    return [
        Found(problem.id, exact.get(place) or near[place], "exact" if place in exact else "near")
        for place, problem in enumerate(held_out)
        if place in exact or place in near
    ]


def normalised(text: str) -> str:
    """The text without what does not make it another one: case, spaces, and how Unicode writes a character."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def runs_of_words(text: str, num_words: int) -> Iterator[str]:
    """Every run of so many words, signs left out; none for a shorter text and for 0."""
    if num_words == 0:
        return
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    for start in range(len(words) - num_words + 1):
        yield " ".join(words[start : start + num_words])
