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
    value = answers.number(gold)
    return float(value is not None and answers.number(found) == value)


def boxed_answer(completion: str, _example: Example) -> str | None:
    r"""What stands in the last \boxed{}, written alike where it is the same number or text."""
    found = answers.boxed(answers.visible(completion))
    return None if found is None else answers.key(found)


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


def math_answer(completion: str, _example: Example) -> str | None:
    """The expression that math-verify finds, as sympy writes it: decimals as fractions, of x = 1 the 1."""
    from math_verify import parse
    from sympy import Eq, Float, Rational

    found = parse(answers.visible(completion), parsing_timeout=None)  # pyrefly: ignore [bad-argument-type]
    if not found:
        return None
    value = found[0].rhs if isinstance(found[0], Eq) and found[0].lhs.is_Symbol else found[0]
    return str(Rational(str(value)) if isinstance(value, Float) else value)


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
