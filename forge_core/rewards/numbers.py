"""Rewards for completions whose answer is a number."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from forge_core.examples import Example
from forge_core.rewards import answers


def exact_number(completion: str, example: Example) -> float:
    """1 when the last number of the completion equals the answer, else 0.

    Thousands separators, fractions, exponents and units are understood, and the comparison is exact ("1,000" is
    1000.0). Raises ValueError when the example's answer is not a number.
    """
    found = answers.last_number(answers.visible(completion))
    return float(found is not None and found == _gold(example, "exact_number"))


def exact_number_answer(completion: str, _example: Example) -> str | None:
    """The number that `exact_number` compares."""
    return _text(answers.last_number(answers.visible(completion)))


def gsm8k(completion: str, example: Example, *, method: Literal["flexible", "strict"] = "flexible") -> float:
    r"""1 when the answer equals the example's, which may be given as GSM8K has it ("... #### 72").

    strict: the answer stands after `####`. flexible: it may also stand in \boxed{}, in <answer> tags, after "the answer
    is", or be the last number. Raises ValueError for another method, and for an example without a numeric answer.
    """
    found = _given(completion, method)
    return float(found is not None and found == _gold(example, "gsm8k"))


def gsm8k_answer(
    completion: str, _example: Example, *, method: Literal["flexible", "strict"] = "flexible"
) -> str | None:
    """The number that `gsm8k` compares."""
    return _text(_given(completion, method))


def _given(completion: str, method: str) -> Fraction | None:
    text = answers.visible(completion)
    match method:
        case "strict":
            declared = answers.after_hashes(text)
        case "flexible":
            declared = answers.declared(text)
        case _:
            raise ValueError(f"gsm8k has no method {method!r}; use flexible or strict")
    found = None if declared is None else answers.first_number(declared)
    if found is None and method == "flexible":
        found = answers.last_number(text)
    return found


def _text(number: Fraction | None) -> str | None:
    return None if number is None else str(number)


def _gold(example: Example, reward: str) -> Fraction:
    text = example.answer or ""
    found = answers.first_number(answers.after_hashes(text) or text)
    if found is None:
        raise ValueError(f"example {example.id} has the answer {example.answer!r}; {reward} needs a number")
    return found
