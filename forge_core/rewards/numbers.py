"""Rewards for completions whose answer is a number."""

from __future__ import annotations

import re
from fractions import Fraction

from forge_core.examples import Example

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def exact_number(completion: str, example: Example) -> float:
    """1 when the last number of the completion equals the answer, else 0.

    Thousands separators are understood and the comparison is exact ("1,000" is 1000.0). Raises ValueError when the
    example's answer is not a number.
    """
    if example.answer is None or not _NUMBER.fullmatch(example.answer.strip()):
        raise ValueError(f"example {example.id} has the answer {example.answer!r}; exact_number needs a number")
    found = _NUMBER.findall(completion)
    return float(bool(found) and _value(found[-1]) == _value(example.answer.strip()))


def _value(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
