"""The problems a policy is trained and judged on, and the order they are taken in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, ValidationError, model_serializer

from forge_core.seeds import derive_seed
from forge_core.settings import Settings


class Message(Settings):
    """One turn of a chat. What is not given is not there for the chat template either."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = Field(None, description="Name of the tool whose answer this is")
    tool_calls: tuple[dict[str, JsonValue], ...] | None = Field(None, description="Calls that the assistant makes")
    tool_call_id: str | None = Field(None, description="The call that a tool answers")
    reasoning_content: str | None = Field(None, description="What the assistant thought before it spoke")

    @model_serializer(mode="wrap")
    def _as_given(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class Example(Settings):
    """One problem: a conversation, the right answer, and whatever its reward functions need to know.

    A conversation that ends with an assistant turn can be learned by SFT; as a problem its `prompt` stops before it.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None
    metadata: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def prompt(self) -> list[dict[str, JsonValue]]:
        """The turns shown to the policy: everything before a final assistant turn."""
        turns = self.messages[:-1] if self.messages[-1].role == "assistant" else self.messages
        return [turn.model_dump() for turn in turns]

    @property
    def conversation(self) -> list[dict[str, JsonValue]]:
        """All turns, for SFT; raises ValueError when there is no assistant turn to learn."""
        if self.messages[-1].role != "assistant":
            raise ValueError(f"example {self.id} has no final assistant turn, so SFT has nothing to learn from it")
        return [turn.model_dump() for turn in self.messages]


Turns = list[dict[str, JsonValue]]


def preference(example: Example) -> tuple[Turns, Turns]:
    """The conversation with the preferred answer, and the same with the other one, `metadata.rejected`.

    Raises ValueError for an example that is no pair.
    """
    rejected = example.metadata.get("rejected")
    if not isinstance(rejected, str):
        raise ValueError(
            f"example {example.id} has no text in metadata.rejected; a pair is a conversation that ends with the "
            "preferred answer, and the other answer there"
        )
    return example.conversation, [*example.prompt, {"role": "assistant", "content": rejected}]


def write_examples(examples: Iterable[Example], path: Path) -> int:
    """Write JSON lines and return their number. Raises ValueError for a repeated id or an example without turns."""
    seen: set[str] = set()
    with path.open("w") as file:
        for example in examples:
            if example.id in seen:
                raise ValueError(f"example id {example.id!r} occurs twice in the dataset; ids must be unique")
            if not example.prompt:
                raise ValueError(f"example {example.id} has no user turn; give it at least one message")
            seen.add(example.id)
            file.write(example.model_dump_json() + "\n")
    return len(seen)


def read_examples(path: Path) -> list[Example]:
    """The examples of a JSON-lines file; raises ValueError with the line that is not one."""
    return [_example(path, number, line) for number, line in enumerate(_lines(path), start=1)]


def pick_examples(path: Path, indices: Sequence[int]) -> list[Example]:
    """The examples in these places (0-based), in this order; the rest of the file is passed over, not held."""
    wanted = set(indices)
    found = {index: _example(path, index + 1, line) for index, line in enumerate(_lines(path)) if index in wanted}
    return [found[index] for index in indices]


def difficulties(path: Path) -> list[float]:
    """`metadata.difficulty` of every example of a JSON-lines file; raises ValueError naming one that has none."""
    found = []
    for number, line in enumerate(_lines(path), start=1):
        value = json.loads(line)["metadata"].get("difficulty")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"{path}:{number} has the metadata.difficulty {value!r}, and order is easy_first; name a field with "
                "fields.difficulty, or leave order out"
            )
        found.append(float(value))
    return found


def _lines(path: Path) -> Iterator[str]:
    with path.open(newline="\n") as file:  # str.splitlines would also split at U+2028, which may stand in a text
        yield from file


def _example(path: Path, number: int, line: str) -> Example:
    try:
        return Example.model_validate(json.loads(line))
    except (ValueError, ValidationError) as error:
        raise ValueError(f"{path}:{number} is not an example: {error}") from error


def take(
    num_total: int, *, start: int, count: int, seed: int, digest: str, difficulties: Sequence[float] | None = None
) -> list[int]:
    """Indices `start` to `start + count` of an endless shuffled stream over `num_total` examples.

    Each epoch is a fresh permutation. The stream is a pure function of (seed, digest), so there is no loader state:
    iteration k takes the window that starts at k * count. `digest` is that of the examples themselves: the same
    examples have the same order, whatever code they came from. With `difficulties`, one for each example, every epoch
    goes from easy to hard, and examples of one difficulty stay shuffled.
    """

    def permutation(epoch: int) -> Sequence[int]:
        order = list(range(num_total))
        random.Random(derive_seed("order", seed, digest, epoch)).shuffle(order)
        return order if difficulties is None else sorted(order, key=difficulties.__getitem__)

    epochs = {epoch: permutation(epoch) for epoch in range(start // num_total, (start + count - 1) // num_total + 1)}
    return [epochs[position // num_total][position % num_total] for position in range(start, start + count)]


@dataclass(frozen=True)
class BatchRewards:
    """What a reward over a whole batch returns when it has numbers to report besides the rewards."""

    values: Sequence[float | None]  # [N]
    metrics: Mapping[str, float]


Reward = Callable[[str, Example], float | None]
Extractor = Callable[[str, Example], str | None]
BatchReward = Callable[[list[str], list[Example]], Sequence[float | None] | BatchRewards]
