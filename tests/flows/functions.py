"""A reward and a loss of a user's own, for tests."""

from __future__ import annotations

from forge_core.examples import Example
from forge_core.losses import LossInputs, LossOutput


def brevity(completion: str, example: Example) -> float:
    """1 for an empty completion, less for every character."""
    return 1 / (1 + len(completion))


def reinforce(inputs: LossInputs) -> LossOutput:
    """The plain policy gradient."""
    return LossOutput(-inputs.advantages * inputs.logprobs)


def parity(completion: str, example: Example) -> float:
    """1 for an odd number of characters: some groups agree on it, others do not."""
    return float(len(completion) % 2)


def constant(completion: str, example: Example, *, value: float) -> float:
    """The same for every completion."""
    return value
