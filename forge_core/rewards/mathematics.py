"""Rewards for completions whose answer is a mathematical expression."""

from __future__ import annotations

import functools
import logging

from forge_core.examples import Example
from forge_core.rewards import answers

logger = logging.getLogger(__name__)


def boxed(completion: str, example: Example) -> float:
    r"""1 when what stands in the last \boxed{} is the answer: the same number, or the same text but for its dress.

    Anything outside of a box counts as no answer. Raises ValueError when the example has no answer.
    """
    gold = _gold(example, "boxed")
    found = answers.boxed(answers.visible(completion))
    if found is None:
        return 0.0
    if answers.same_text(found, gold):
        return 1.0
    value = answers.first_number(gold) if _is_number(gold) else None
    return float(value is not None and _is_number(found) and answers.first_number(found) == value)


def math(completion: str, example: Example) -> float | None:
    """1 when math-verify finds the answer equivalent, else 0; None when it cannot read the example's answer.

    It runs without its own time limit, which works in the main thread alone: a reward's deadline ends its process.
    """
    gold = _parsed_gold(_gold(example, "math"))
    if not gold:
        return None
    from math_verify import parse, verify

    found = parse(answers.visible(completion), parsing_timeout=None)  # pyrefly: ignore [bad-argument-type]
    return float(bool(found) and verify(list(gold), found, timeout_seconds=None))  # pyrefly: ignore [bad-argument-type]


@functools.lru_cache(maxsize=4096)
def _parsed_gold(text: str) -> tuple:
    from math_verify import parse

    found = parse(f"${text}$", parsing_timeout=None)  # pyrefly: ignore [bad-argument-type]
    return () if all(isinstance(one, str) for one in found) else tuple(found)


def _gold(example: Example, reward: str) -> str:
    if not (example.answer or "").strip():
        raise ValueError(f"example {example.id} has the answer {example.answer!r}; {reward} needs one")
    text = str(example.answer).strip()
    return answers.boxed(text) or answers.after_hashes(text) or text


def _is_number(text: str) -> bool:
    """Whether a text is a number with at most a unit behind it."""
    bare = answers.strip_latex(text)
    return bool(bare) and not bare.lstrip("+-(\u2212 .")[:1].isalpha() and answers.first_number(bare) is not None
