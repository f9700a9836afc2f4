"""What every parser of answers does with text that nobody has thought of; and what two graders say of one file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_core.examples import Example, Message
from forge_core.rewards import answers, form, mathematics, numbers

PIECES = [
    *"0123456789.,-+/^_eE$%#{}()|= \n<>\\\u2212\u2028",
    *("\\boxed{", "\\frac{1}{", "\\text{", "\\sqrt{", "\\left(", "<think>", "</think>", "<answer>", "</answer>"),
    *("#### ", "answer is ", "1,000", "1/0", "9^{9^{9}}", "\\frac12", "\U0001f600", "\ud800"),
]
TEXTS = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
EXAMPLE = Example(id="e", messages=(Message(role="user", content="?"),), answer="72")
REWARDS: tuple[Callable[[str, Example], float | None], ...] = (
    numbers.exact_number,
    numbers.gsm8k,
    lambda completion, example: numbers.gsm8k(completion, example, method="strict"),
    mathematics.boxed,
    form.thinking,
    lambda completion, example: form.thinking(completion, example, opened_by_prompt=True),
    form.format,
    lambda completion, example: form.length(completion, example, limit=100),
    lambda completion, example: form.regex(completion, example, pattern=r"\d+"),
)
FINDERS = (answers.after_hashes, answers.boxed, answers.tagged, answers.declared)
LONG = (
    "\\boxed{",
    "\\frac{1}{",
    "\\text{",
    "<think>",
    "</think>",
    "<answer>",
    "1,",
    "9",
    "-",
    "1/",
    "#### ",
    "answer is ",
)


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_no_text_makes_a_reward_raise_or_leave_its_range(text: str):
    for reward in REWARDS:
        assert 0 <= (reward(text, EXAMPLE) or 0) <= 1


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_no_text_makes_a_parser_raise_and_what_it_finds_stands_in_the_text(text: str):
    for find in FINDERS:
        found = find(text)
        assert found is None or found in text
    for read in (answers.first_number, answers.last_number):
        read(text)
    assert answers.same_text(text, answers.strip_latex(text)) or "\\" in answers.strip_latex(text)


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_taking_the_thinking_away_twice_takes_nothing_more(text: str):
    seen = answers.visible(text)
    assert answers.visible(seen) == seen
    assert seen in text


@settings(deadline=None, max_examples=200)
@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "#### {}", "work\n#### {}", "#### {} clips", "#### ${:,}"])
)
def test_a_gold_answer_is_the_same_however_often_it_is_extracted(value: int, form_of: str):
    gold = form_of.format(value).replace("$-", "-$")
    once = answers.after_hashes(gold) or gold
    twice = answers.after_hashes(once) or once
    assert once == twice
    if "$" not in gold or value >= 0:
        assert answers.first_number(once) == value
        assert numbers.gsm8k(f"#### {value}", EXAMPLE.model_copy(update={"answer": gold})) == 1


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_math_verify_scores_whatever_it_is_given(text: str):
    assert mathematics.math(f"{text.replace('9^{9^{9}}', '')} \\boxed{{7}}", EXAMPLE) in (0, 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("piece", LONG)
def test_a_megabyte_of_anything_is_read_in_time_that_grows_with_its_length(piece: str):
    text = piece * (1_000_000 // len(piece))
    for reward in REWARDS:  # were it the square of the length, hours: the test's own limit ends it
        for completion in (f"the answer{text}", f"<think>a</think><answer>{text}</answer>"):
            assert 0 <= (reward(completion, EXAMPLE) or 0) <= 1


# Twenty answers to problems whose answer is 72: the first eight in GSM8K's form, five right in another form.
TWENTY = [
    *("#### 72", "#### 72.", "48+24=72\n#### 72", "#### 72 clips", "#### $72", "#### 72.00", "#### 072", "so\n####72"),
    *("#### 71", "#### 7", "#### 720", "####", "#### seventy-two"),
    *("The answer is 72.", "\\boxed{72}", "<answer>72</answer>", "She sold 72 clips.", "It is 72"),
    *("The answer is 27.", "72 in April and 24 in May"),
]


def test_twenty_answers_have_two_exact_accuracies_strict_and_flexible():
    assert len(TWENTY) == 20
    strict = sum(numbers.gsm8k(text, EXAMPLE, method="strict") for text in TWENTY)
    flexible = sum(numbers.gsm8k(text, EXAMPLE) for text in TWENTY)
    assert (strict, flexible) == (8, 13)
