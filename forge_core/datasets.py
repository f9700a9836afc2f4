"""Built-in datasets: functions that yield `Example`s. Yours is a `package.module:function` of the same form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Literal

import fsspec

from forge_core.examples import Example, Message

Split = Literal["train", "test"]


def arithmetic(
    *, split: Split = "train", min_number: int = 0, max_number: int = 99, test_fraction: float = 0.1
) -> Iterator[Example]:
    """Sums `a+b=` of numbers from `min_number` to `max_number`.

    The split is decided by the hash of the unordered pair, so that no held-out sum was practised the other way round.
    """
    for a in range(min_number, max_number + 1):
        for b in range(min_number, max_number + 1):
            if _split_of(f"{min(a, b)}+{max(a, b)}", test_fraction) == split:
                question, answer = f"{a}+{b}=", str(a + b)
                turns = (Message(role="user", content=question), Message(role="assistant", content=answer))
                yield Example(id=question, messages=turns, answer=answer)


def reasoning_gym(
    *, task: str, size: int = 500, seed: int = 0, split: Split = "train", **task_settings
) -> Iterator[Example]:
    """Problems of a reasoning-gym task; the test split has its own seed, so that the two do not share a stream.

    `task_settings` are the task's own parameters (see its Config class). Scored by the reward `reasoning_gym`.
    """
    import reasoning_gym as gym

    stream_seed = seed if split == "train" else seed + 1_000_003
    for index, entry in enumerate(gym.create_dataset(task, size=size, seed=stream_seed, **task_settings)):
        yield Example(
            id=f"{task}-{split}-{index}",
            messages=(Message(role="user", content=entry["question"]),),
            answer=entry["answer"],
            metadata={
                "task": task,
                "task_settings": task_settings,
                "entry": json.loads(json.dumps(entry, default=str)),
            },
        )


def jsonl(
    *, path: str, question: str = "question", answer: str = "answer", response: str | None = None
) -> Iterator[Example]:
    """Rows of a JSON-lines file at any fsspec URI; `question`, `answer` and `response` name the fields.

    `response` (optional) is the assistant turn that SFT learns. Raises ValueError with the line of a row that lacks
    one of them.
    """
    with fsspec.open(path, "rt") as file:
        for number, line in enumerate(file, start=1):
            row = json.loads(line)
            for name in (question, answer, *([response] if response else [])):
                if row.get(name) in (None, ""):
                    raise ValueError(f"{path}:{number} has no {name!r}; its fields are {', '.join(row)}")
            turns = [Message(role="user", content=row[question])]
            if response:
                turns.append(Message(role="assistant", content=row[response]))
            digest = hashlib.sha256(line.encode()).hexdigest()
            yield Example(id=f"{number}-{digest[:8]}", messages=tuple(turns), answer=str(row[answer]))


def _split_of(text: str, test_fraction: float) -> Split:
    position = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "test" if position < test_fraction else "train"
