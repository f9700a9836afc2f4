"""The built-in verifiers against a table of verdicts, in every thread, and on text that nobody expects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.config import FunctionConfig
from forge_core.examples import Example, Message
from forge_core.functions import check_function
from forge_core.rewards import answers, form, mathematics, numbers
from tests.forge_core.rewards import verifier_table as table

PIECES = [*"0123456789.,-+/eE$%#{}() \n<>é\\", "\\boxed{", "\\frac{1}{", "<think>", "</think>", "#### ", "<answer>"]
WEIRD = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def example(answer: str | None = "72") -> Example:
    return Example(id="e", messages=(Message(role="user", content="?"),), answer=answer)


def strict(completion: str, example: Example) -> float:
    return numbers.gsm8k(completion, example, method="strict")


ROWS = [
    pytest.param(reward, *row, id=f"{name}: {row[0][:40]!r} for {row[1][-20:]!r}")
    for name, reward, rows in (
        ("exact_number", numbers.exact_number, table.EXACT_NUMBER),
        ("gsm8k flexible", numbers.gsm8k, table.GSM8K_FLEXIBLE),
        ("gsm8k strict", strict, table.GSM8K_STRICT),
        ("boxed", mathematics.boxed, table.BOXED),
        ("math", mathematics.math, table.MATH),
    )
    for row in rows
]


@pytest.mark.parametrize(("reward", "completion", "answer", "verdict"), ROWS)
def test_an_answer_gets_the_verdict_it_deserves(reward, completion, answer, verdict):
    assert reward(completion, example(answer)) == verdict


@pytest.mark.parametrize(
    ("reward", "completion", "verdict"),
    [(form.thinking, *row) for row in table.THINKING] + [(form.format, *row) for row in table.FORMAT],
)
def test_form_is_paid_for_when_it_is_all_there(reward, completion, verdict):
    assert reward(completion, example()) == verdict


def test_the_table_is_long_enough_to_mean_something():
    assert len(ROWS) + len(table.THINKING) + len(table.FORMAT) >= 80


def test_a_thought_may_begin_in_the_prompt():
    assert form.thinking("because</think>x", example(), opened_by_prompt=True) == 1
    assert form.thinking("</think>x", example(), opened_by_prompt=True) == 0
    assert form.format("because</think><answer>x</answer>", example(), opened_by_prompt=True) == 1


def test_patterns_and_lengths():
    assert form.regex("a1b", example(), pattern=r"\d") == 1
    assert form.regex("a1b", example(), pattern=r"\d", whole=True) == 0
    assert [form.length("x" * count, example(), limit=4) for count in (0, 1, 4, 9)] == [1, 0.75, 0, 0]
    with pytest.raises(ValueError, match="limit 0; it must be at least 1"):
        form.length("x", example(), limit=0)


@pytest.mark.parametrize("reward", [numbers.exact_number, numbers.gsm8k])
@pytest.mark.parametrize("answer", [None, "", "many"])
def test_an_example_whose_answer_is_no_number_is_an_error(reward, answer):
    with pytest.raises(ValueError, match=f"example e has the answer {answer!r}; {reward.__name__} needs a number"):
        reward("5", example(answer))


def test_an_answer_that_math_verify_cannot_read_gives_no_score_instead_of_a_wrong_one():
    assert mathematics.math("\\boxed{5}", example("???")) is None
    with pytest.raises(ValueError, match="math needs one"):
        mathematics.math("5", example(None))


def test_a_method_or_a_setting_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="gsm8k has no method 'fuzzy'; use flexible or strict"):
        numbers.gsm8k("5", example(), method="fuzzy")  # type: ignore[arg-type]
    for name in ("gsm8k", "boxed", "math", "thinking", "format", "regex", "length"):
        with pytest.raises(ValueError, match=f"reward {name} has no setting 'nonsense'"):
            check_function(FunctionConfig(fn=name, kwargs={"nonsense": 1}), "reward")


@pytest.mark.parametrize("reward", [numbers.exact_number, numbers.gsm8k, mathematics.boxed, mathematics.math])
def test_a_verdict_is_the_same_in_a_thread_and_in_a_coroutine(reward: Callable):
    completion = "It is \\boxed{72}"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reward, completion, example()).result() == 1
    assert asyncio.run(asyncio.to_thread(reward, completion, example())) == 1


@settings(deadline=None, max_examples=300)
@given(WEIRD)
def test_no_text_makes_a_parser_raise(text: str):
    for reward in (numbers.exact_number, numbers.gsm8k, strict, mathematics.boxed, form.thinking, form.format):
        assert reward(text, example()) in (0, 1)
    assert answers.same_text(text, text)


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3), st.integers(1, 99))
def test_a_number_is_read_as_what_it_was_written(value: Decimal, denominator: int):
    written = f"{value:,}"
    assert answers.last_number(written) == Fraction(value)
    assert answers.last_number(f"It is ${written}.") == Fraction(value)
    assert answers.first_number(f"{int(value)}/{denominator} of it") == Fraction(int(value), denominator)


@given(WEIRD)
def test_finding_an_answer_twice_finds_the_same(text: str):
    found = answers.boxed(text)
    if found is not None:
        assert answers.boxed(f"\\boxed{{{found}}}") == (answers.boxed(found) or found)
    number = answers.last_number(text)
    if number is not None and number.denominator == 1:
        assert answers.last_number(str(number)) == number


def test_long_text_takes_no_time_that_grows_with_its_square():
    for text in ("1," * 50_000, "\\boxed{" * 20_000, "<think>" * 20_000, "9" * 100_000, "-" * 100_000):
        assert numbers.gsm8k(text, example()) in (0, 1)
        assert mathematics.boxed(text, example()) in (0, 1)
    assert re.fullmatch(r"9+", "9" * 100_000)
