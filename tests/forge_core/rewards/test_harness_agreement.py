"""Our graders and those of lm-evaluation-harness on one fixed file of predictions; where they differ is listed.

The harness's are its two filters for GSM8K, strict-match and flexible-extract, and its comparison of texts, copied from
lm_eval/tasks/gsm8k/gsm8k.yaml (version 3.0).
"""

from __future__ import annotations

import re

import pytest

from forge_core.examples import Example, Message
from forge_core.rewards.numbers import gsm8k

PREDICTIONS = [
    # completion, answer, what ours say and what the harness says: (strict, flexible)
    ("48 / 2 = 24, and 48 + 24 = 72.\n#### 72", "#### 72", (1, 1), (1, 1)),
    ("She sells 24, so 72 in all.\n#### 71", "#### 72", (0, 0), (0, 0)),
    ("The answer is 72.", "#### 72", (0, 1), (0, 1)),
    ("It is 72 or so, I cannot say", "#### 72", (0, 1), (0, 1)),
    ("I do not know", "#### 72", (0, 0), (0, 0)),
    ("#### -3", "#### -3", (1, 1), (1, 1)),
    ("#### 1,000", "#### 1000", (1, 1), (1, 1)),
    ("", "#### 72", (0, 0), (0, 0)),
    # Differences, each because ours reads numbers and the harness compares texts:
    ("#### 72.00", "#### 72", (1, 1), (0, 0)),
    ("#### $72", "#### 72", (1, 1), (0, 1)),
    ("#### 1/2", "#### 0.5", (1, 1), (0, 0)),
    # ... because ours takes the answer where it is declared, the harness the last number:
    ("The answer is 72, of which 24 were sold in May", "#### 72", (0, 1), (0, 0)),
    ("\\boxed{72}, as 3 * 24 = 72 and 24 = 48 / 2", "#### 72", (0, 1), (0, 0)),
    # ... because ours takes the last ####, strict-match the first:
    ("#### 71\nNo, wait.\n#### 72", "#### 72", (1, 1), (0, 1)),
    # ... and because thinking is no answer:
    ("<think>#### 72</think>I give up", "#### 72", (0, 0), (1, 1)),
]


def harness(completion: str, answer: str) -> tuple[int, int]:
    strict = re.search(r"#### (\-?[0-9\.\,]+)", completion)
    flexible = [first or second for first, second in re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", completion)]
    found = (strict.group(1) if strict else "[invalid]", flexible[-1] if flexible else "[invalid]")
    return tuple(int(_bare(text) == _bare(answer)) for text in found)  # type: ignore[return-value]


def _bare(text: str) -> str:
    for pattern in (",", r"\$", "(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower()


@pytest.mark.parametrize(("completion", "answer", "ours", "theirs"), PREDICTIONS)
def test_verdicts_are_those_of_the_harness_but_for_the_differences_listed(completion, answer, ours, theirs):
    example = Example(id="x", messages=(Message(role="user", content="?"),), answer=answer)
    found = (gsm8k(completion, example, method="strict"), gsm8k(completion, example))
    assert found == ours
    assert harness(completion, answer) == theirs
