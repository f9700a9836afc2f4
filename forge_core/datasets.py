"""Built-in datasets: functions that yield `Example`s. Yours is a `package.module:function` of the same form."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import Field

from forge_core import tables
from forge_core.examples import Example, Message
from forge_core.functions import check_function, load_function
from forge_core.rewards.answers import after_hashes, boxed, first_number
from forge_core.seeds import derive_seed
from forge_core.settings import FunctionConfig, Settings

Split = Literal["train", "test"]


def arithmetic(
    *,
    split: Split = "train",
    min_number: int = 0,
    max_number: int = 99,
    test_fraction: float = 0.1,
    pairs: bool = False,
) -> Iterator[Example]:
    """Sums `a+b=` of numbers from `min_number` to `max_number`.

    The split is decided by the hash of the unordered pair, so that no held-out sum was practised the other way round.
    With `pairs`, `metadata.rejected` is a wrong sum, for DPO.
    """
    for a in range(min_number, max_number + 1):
        for b in range(min_number, max_number + 1):
            if _split_of(f"{min(a, b)}+{max(a, b)}", test_fraction) == split:
                question, answer = f"{a}+{b}=", str(a + b)
                turns = (Message(role="user", content=question), Message(role="assistant", content=answer))
                metadata = {"rejected": str(a + b + 1)} if pairs else {}
                yield Example(id=question, messages=turns, answer=answer, metadata=metadata)


def reasoning_gym(
    *,
    task: str,
    size: int = 500,
    seed: int = 0,
    split: Split = "train",
    response: str | None = None,
    **task_settings,
) -> Iterator[Example]:
    """Problems of a reasoning-gym task; the test split has its own seed, so that the two do not share a stream.

    `task_settings` are the task's own parameters (see its Config class), `response` names what of an entry is the
    assistant's turn for SFT, e.g. answer or metadata.answer_cot. Scored by the reward `reasoning_gym`.
    """
    import reasoning_gym as gym

    stream_seed = seed if split == "train" else seed + 1_000_003
    for index, entry in enumerate(gym.create_dataset(task, size=size, seed=stream_seed, **task_settings)):
        turns = [Message(role="user", content=entry["question"])]
        if response is not None:
            answer = tables.pick(entry, response, f"{task}:{index}")
            turns.append(Message(role="assistant", content=str(answer)))
        yield Example(
            id=f"{task}-{split}-{index}",
            messages=tuple(turns),
            answer=entry["answer"],
            metadata={
                "task": task,
                "task_settings": task_settings,
                "entry": json.loads(json.dumps(entry, default=str)),
            },
        )


class Fields(Settings):
    """Which fields of a row make an example; "a.b" and "a.0" name what lies inside of a field."""

    question: str = Field("question", description="The user's turn")
    answer: str | None = Field("answer", description="What rewards compare with; null when there is no answer")
    response: str | None = Field(None, description="The assistant's turn, for SFT")
    messages: str | None = Field(None, description="Whole chats, [{role, content}, ...], in place of the two turns")
    rejected: str | None = Field(None, description="The answer that is not preferred: a text or a whole chat, for DPO")
    metadata: tuple[str, ...] = Field((), description="Fields that rewards need to see")
    difficulty: str | None = Field(
        None, description="How hard the problem is, for grpo.order: a number, or a text with one, such as Level 3"
    )


def file(
    *,
    path: str,
    format: tables.Format = "auto",
    fields: dict | None = None,
    system: str | None = None,
    split: Split | None = None,
    test_fraction: float = 0.1,
) -> Iterator[Example]:
    """Rows of JSON-lines, CSV, parquet or Arrow files at any fsspec URI; a pattern with * takes several.

    `fields` are settings of `Fields`, `system` is a text put in front of every chat. With a `split`, the hash of the
    prompt decides which rows belong to it, so equal prompts are never on both sides. Raises ValueError with the place
    of a row that lacks a field.
    """
    chosen = Fields.model_validate(fields or {})
    examples = (_example(place, row, chosen, system) for place, row in tables.read_rows(path, format))
    return _of_split(examples, split, test_fraction)


def hub(
    *,
    name: str,
    config: str | None = None,
    part: str = "train",
    revision: str | None = None,
    fields: dict | None = None,
    system: str | None = None,
    split: Split | None = None,
    test_fraction: float = 0.1,
) -> Iterator[Example]:
    """A dataset of the Hugging Face hub, or a directory in its layout, streamed; the rest is as for `file`.

    `part` is the hub's own split, e.g. train. Pin `revision`: what a name stands for may change.
    """
    from datasets import load_dataset

    chosen = Fields.model_validate(fields or {})
    rows = load_dataset(name, config, split=part, revision=revision, streaming=True)
    examples = (_example(f"{name}:{number}", dict(row), chosen, system) for number, row in enumerate(rows, start=1))
    return _of_split(examples, split, test_fraction)


def gsm8k(*, part: Literal["train", "test"] = "train", path: str | None = None) -> Iterator[Example]:
    """Grade-school word problems with worked answers (arXiv:2110.14168), from the hub or from the file at `path`.

    The answer is what follows `####`; the worked solution is the assistant's turn, for SFT.
    """
    fields = {"response": "answer"}
    source = (
        file(path=path, fields=fields) if path else hub(name="openai/gsm8k", config="main", part=part, fields=fields)
    )
    for example in source:
        answer = after_hashes(example.answer or "")
        if answer is None:
            raise ValueError(f"example {example.id} of gsm8k has no #### in its answer")
        yield example.model_copy(update={"answer": answer})


def math(
    *,
    part: Literal["train", "test"] = "train",
    path: str | None = None,
    name: str = "DigitalLearningGmbH/MATH-lighteval",
    revision: str | None = None,
) -> Iterator[Example]:
    r"""Competition problems with worked solutions (MATH, arXiv:2103.03874), from the hub or from the file at `path`.

    The answer is what stands in the solution's last \boxed{}; the solution is the assistant's turn, for SFT, and the
    level (1 to 5) the difficulty. Rows have the fields problem, solution and level.
    """
    fields = {"question": "problem", "answer": "solution", "response": "solution", "difficulty": "level"}
    source = file(path=path, fields=fields) if path else hub(name=name, part=part, revision=revision, fields=fields)
    for example in source:
        answer = boxed(example.answer or "")
        if answer is None:
            raise ValueError(f"example {example.id} of math has no closed \\boxed{{}} in its solution")
        yield example.model_copy(update={"answer": answer})


def countdown(*, size: int = 500, seed: int = 0, split: Split = "train", **task_settings) -> Iterator[Example]:
    """Numbers to be made into a target by + - * /, each used once: reasoning-gym's task of this name.

    Any expression that reaches the target is right: score it with the reward `reasoning_gym`. Raises what
    `reasoning_gym` raises.
    """
    yield from reasoning_gym(task="countdown", size=size, seed=seed, split=split, **task_settings)


def mixture(*, sources: Sequence[dict], size: int, seed: int = 0) -> Iterator[Example]:
    """`size` examples of several datasets, [{fn, kwargs, weight}, ...], in the proportion of their weights.

    Which source is next is drawn with the seed; examples of one source keep their order, and `metadata.source` names
    it. Raises ValueError when a source has too few: nothing is repeated in silence.
    """
    configs = [FunctionConfig(fn=source["fn"], kwargs=source.get("kwargs", {})) for source in sources]
    for config in configs:
        check_function(config, "dataset")
    streams = [iter(load_function(config, "dataset")()) for config in configs]
    weights = [float(source.get("weight", 1.0)) for source in sources]
    drawn = random.Random(derive_seed("mixture", seed)).choices(range(len(sources)), weights, k=size)
    for number, index in enumerate(drawn):
        example, name = next(streams[index], None), configs[index].fn
        if example is None:
            raise ValueError(
                f"mixture: source {index} ({name}) has {drawn[:number].count(index)} examples and "
                f"{drawn.count(index)} are wanted; lower size or its weight"
            )
        metadata = example.metadata | {"source": name}
        yield example.model_copy(update={"id": f"{index}:{example.id}", "metadata": metadata})


def _example(place: str, row: tables.Row, fields: Fields, system: str | None) -> Example:
    if fields.messages is not None:
        turns = [Message.model_validate(turn) for turn in tables.pick(row, fields.messages, place)]
    else:
        turns = [Message(role="user", content=str(tables.pick(row, fields.question, place)))]
        if fields.response is not None:
            turns.append(Message(role="assistant", content=str(tables.pick(row, fields.response, place))))
    if system is not None:
        turns.insert(0, Message(role="system", content=system))
    metadata = {name: tables.pick(row, name, place) for name in fields.metadata}
    if fields.difficulty is not None:
        metadata["difficulty"] = _difficulty(tables.pick(row, fields.difficulty, place), place)
    if fields.rejected is not None:
        rejected = tables.pick(row, fields.rejected, place)
        metadata["rejected"] = rejected[-1]["content"] if isinstance(rejected, list) else str(rejected)
    found = Example(
        id="",
        messages=tuple(turns),
        answer=None if fields.answer is None else str(tables.pick(row, fields.answer, place)),
        metadata=metadata,
    )
    digest = hashlib.sha256(found.model_dump_json().encode()).hexdigest()
    return found.model_copy(update={"id": f"{place.rpartition(':')[2]}-{digest[:12]}"})


def _difficulty(value: object, place: str) -> float:
    found = first_number(str(value))
    if found is None:
        raise ValueError(f"{place} has the difficulty {value!r}, which holds no number; name another field")
    return float(found)


def _of_split(examples: Iterable[Example], split: Split | None, test_fraction: float) -> Iterator[Example]:
    for example in examples:
        if split is None or _split_of(json.dumps(example.prompt), test_fraction) == split:
            yield example


def _split_of(text: str, test_fraction: float) -> Split:
    position = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return "test" if position < test_fraction else "train"
