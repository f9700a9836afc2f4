"""Rewards for completions that are programs."""

from __future__ import annotations

import re
import time
from typing import Literal

from forge_core.examples import Example
from forge_core.rewards.answers import visible
from forge_core.rewards.sandbox import run_python

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code(
    completion: str,
    example: Example,
    *,
    seconds: float = 5.0,
    megabytes: int = 512,
    partial: bool = False,
    isolation: Literal["required", "none"] = "required",
) -> float:
    """1 when the completion's last Python block passes the tests in the example's `metadata.tests`, else 0.

    Tests are a list of {"stdin": ..., "stdout": ...}, compared up to trailing spaces, or a text of assertions about
    what the program defines. A program never sees an expected output; assertions share its process, so a program that
    means to cheat can. With `partial` the reward is the fraction of passed tests. `seconds` is for all tests together;
    keep it below the reward's `timeout_seconds`. Raises ValueError for an example without tests.
    """
    tests = example.metadata.get("tests")
    if not tests or not isinstance(tests, str | list):
        raise ValueError(f"example {example.id} has no metadata.tests (a list of stdin/stdout, or assertions)")
    blocks = _BLOCK.findall(visible(completion))
    if not blocks:
        return 0.0
    cases: list = [tests] if isinstance(tests, str) else tests
    deadline = time.monotonic() + seconds
    num_passed = 0
    for case in cases:
        is_text = isinstance(case, str)
        outcome = run_python(
            blocks[-1],
            stdin="" if is_text else str(case["stdin"]),
            check=case if is_text else "",
            seconds=max(0.1, deadline - time.monotonic()),
            megabytes=megabytes,
            is_isolated=isolation == "required",
        )
        is_same = is_text or _lines(outcome.stdout) == _lines(str(case["stdout"]))
        num_passed += outcome.status == "finished" and is_same
        if not partial and not num_passed:
            break
    return num_passed / len(cases) if partial else float(num_passed == len(cases))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
