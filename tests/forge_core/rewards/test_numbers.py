"""`exact_number`: which strings are right."""

from __future__ import annotations

import pytest

from forge_core.examples import Example, Message
from forge_core.rewards.numbers import exact_number


def example(answer: str | None) -> Example:
    return Example(id="e", messages=(Message(role="user", content="?"),), answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("72", "72", 1.0),
        ("So she has 72 clips, altogether.", "72", 1.0),
        ("1,234", "1234", 1.0),
        ("72.", "72", 1.0),
        ("72.0", "72", 1.0),
        ("$72.00", "72", 1.0),
        ("-5", "-5", 1.0),
        ("5", "-5", 0.0),
        ("12 and then 27", "27", 1.0),
        ("15", "5", 0.0),
        ("5.1", "5", 0.0),
        ("", "5", 0.0),
        (",", "5", 0.0),
    ],
)
def test_the_last_number_counts(completion, answer, expected):
    assert exact_number(completion, example(answer)) == expected


@pytest.mark.parametrize("answer", [None, "", "many"])
def test_an_answer_that_is_no_number_is_an_error(answer):
    with pytest.raises(ValueError, match="example e has the answer"):
        exact_number("5", example(answer))
