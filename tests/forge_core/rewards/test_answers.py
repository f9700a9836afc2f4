"""What a completion gives as its answer: the key that votes are counted by, and answers that contradict each other."""

from __future__ import annotations

import pytest

from forge_core.examples import Example, Message
from forge_core.rewards import answers, gym, mathematics, numbers

EXAMPLE = Example(id="x", messages=(Message(role="user", content="?"),), answer="1/2")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("It is \\boxed{72}", {"72"}),
        ("\\boxed{0.5}, that is \\boxed{\\frac{1}{2}}\n#### 1/2", {"1/2"}),  # one answer, three times
        ("\\boxed{3} or \\boxed{4}", {"3", "4"}),
        ("#### 3\n#### 4 apples", {"3", "4"}),
        ("\\boxed{(1, 2)} and \\boxed{(1,3)}", {"(1,2)", "(1,3)"}),
        ("<think>\\boxed{3}</think>\\boxed{4}", {"4"}),
        ("72, or rather 73", set()),
    ],
)
def test_answers_that_are_declared_are_counted_by_what_they_mean(completion: str, expected: set[str]):
    assert answers.all_declared(completion) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72", 72),
        ("-3", -3),
        ("$1,000.00", 1000),
        ("72 cm^2", 72),
        ("5cm", 5),
        ("50 %", 50),
        ("(1, 2)", None),
        ("2^{10}", None),
        ("2\\pi", None),
        ("2x", None),
        ("x5", None),
        ("", None),
    ],
)
def test_a_number_is_the_whole_text_but_for_its_unit(text: str, expected: int | None):
    assert answers.number(text) == expected


@pytest.mark.parametrize(
    ("extract", "completion", "expected"),
    [
        (numbers.exact_number_answer, "first 3, then 0.5", "1/2"),
        (numbers.exact_number_answer, "no idea", None),
        (numbers.gsm8k_answer, "#### 72 clips in 3 days", "72"),
        (mathematics.boxed_answer, "\\boxed{50\\%}", "50"),
        (mathematics.boxed_answer, "50", None),
        (mathematics.math_answer, "so $x = \\frac{1}{2}$", "1/2"),
        (mathematics.math_answer, "no idea", None),
        (gym.reasoning_gym_answer, "I think\n<answer> A  dog. </answer>", "adog"),
        (gym.reasoning_gym_answer, "I think\n7.0", "7"),
        (gym.reasoning_gym_answer, "", None),
    ],
)
def test_a_reward_says_what_it_takes_for_the_answer(extract, completion: str, expected: str | None):
    assert extract(completion, EXAMPLE) == expected


def test_the_strict_method_of_gsm8k_takes_only_what_stands_after_hashes():
    assert numbers.gsm8k_answer("the answer is 5", EXAMPLE, method="strict") is None
    assert numbers.gsm8k_answer("the answer is 5", EXAMPLE) == "5"
