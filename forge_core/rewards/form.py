"""Rewards for the form of a completion. They are paid for form alone, so give them a small weight or a `gate`."""

from __future__ import annotations

import re

from forge_core.examples import Example

_THOUGHT = re.compile(r"\s*<think>(?P<thought>.*?)</think>(?P<rest>.*)", re.DOTALL)
_ANSWER = re.compile(r"\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def thinking(completion: str, example: Example, *, opened_by_prompt: bool = False) -> float:
    """1 for one thought in <think>...</think>, not empty, at the beginning, and something said after it; else 0.

    `opened_by_prompt`: the chat template ends with <think>, so the completion begins inside of it.
    """
    return float(_after_thought(completion, opened_by_prompt) is not None)


def format(completion: str, example: Example, *, opened_by_prompt: bool = False) -> float:
    """1 for <think>...</think><answer>...</answer> with nothing around it and neither empty; else 0."""
    rest = _after_thought(completion, opened_by_prompt)
    found = _ANSWER.fullmatch(rest) if rest is not None else None
    is_alone = all(completion.count(tag) <= 1 for tag in _TAGS)
    return float(found is not None and bool(found["answer"].strip()) and is_alone)


def regex(completion: str, example: Example, *, pattern: str, whole: bool = False) -> float:
    """1 when the pattern is found in the completion, or with `whole` when it matches all of it; else 0."""
    find = re.fullmatch if whole else re.search
    return float(find(pattern, completion, re.DOTALL) is not None)


def length(completion: str, example: Example, *, limit: int) -> float:
    """1 for an empty completion, falling to 0 at `limit` characters; `overlong` counts tokens instead."""
    if limit < 1:
        raise ValueError(f"length has limit {limit}; it must be at least 1 character")
    return max(0.0, 1 - len(completion) / limit)


def _after_thought(completion: str, opened_by_prompt: bool) -> str | None:
    """What follows a single, non-empty thought; None when the tags are not as they should be."""
    text = f"<think>{completion}" if opened_by_prompt else completion
    found = _THOUGHT.fullmatch(text)
    if found is None or text.count("<think>") != 1 or text.count("</think>") != 1:
        return None
    return found["rest"] if found["thought"].strip() and found["rest"].strip() else None
