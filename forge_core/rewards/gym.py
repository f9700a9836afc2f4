"""Reward by the scorer of the reasoning-gym task an example came from."""

from __future__ import annotations

import functools
import json

import reasoning_gym as gym

from forge_core.examples import Example
from forge_core.rewards import answers


def reasoning_gym(completion: str, example: Example) -> float:
    """The task's own score in [0, 1] of the completion's <answer>...</answer>, or of its last line when it has none."""
    entry = example.metadata.get("entry")
    if not isinstance(entry, dict):
        raise ValueError(
            f"example {example.id} does not come from the dataset reasoning_gym, so it has no task to score it"
        )
    answer = _answer(completion)
    scorer = _task(str(example.metadata["task"]), json.dumps(example.metadata["task_settings"]))
    return float(scorer.score_answer(answer=answer, entry=entry))


def reasoning_gym_answer(completion: str, _example: Example) -> str | None:
    """What the task's scorer is given, but for its dress; None for an empty completion."""
    return answers.key(_answer(completion)) or None


def _answer(completion: str) -> str:
    return gym.utils.extract_answer(completion) or completion.strip().rsplit("\n", 1)[-1]


@functools.cache
def _task(name: str, settings: str):
    return gym.create_dataset(name, size=1, seed=0, **json.loads(settings))
