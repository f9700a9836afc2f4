"""Reward by the scorer of the reasoning-gym task an example came from."""

from __future__ import annotations

import functools
import json

import reasoning_gym as gym

from forge_core.examples import Example


def reasoning_gym(completion: str, example: Example) -> float:
    """The task's own score in [0, 1] of the completion's <answer>...</answer>, or of its last line when it has none."""
    entry = example.metadata.get("entry")
    if not isinstance(entry, dict):
        raise ValueError(
            f"example {example.id} does not come from the dataset reasoning_gym, so it has no task to score it"
        )
    answer = gym.utils.extract_answer(completion) or completion.strip().rsplit("\n", 1)[-1]
    scorer = _task(str(example.metadata["task"]), json.dumps(example.metadata["task_settings"]))
    return float(scorer.score_answer(answer=answer, entry=entry))


@functools.cache
def _task(name: str, settings: str):
    return gym.create_dataset(name, size=1, seed=0, **json.loads(settings))
