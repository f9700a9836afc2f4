"""A process that calls reward functions for the owner of `forge_core.rewards.pool`, and may be killed at any time.

    python -m forge_core.rewards.worker FD

FD is one end of a socket pair that carries JSON, one value a line. The owner first sends the functions, each with
`extractor`, the one that says what it takes for the answer, or null. They are answered by {"ready": true} once they are
imported. Then come batches of two lines: calls [[function index, completion], ...] and their examples. Every call gets
its answer as soon as it has one: {"value": number or null, "extracted": text or null} or {"error": message}. A function
over whole batches gets one call for all; {"metrics": {...}} comes before its values.

Imports no torch, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import TypeAdapter

from forge_core.config import FunctionConfig
from forge_core.examples import BatchReward, BatchRewards, Example, Extractor, Reward
from forge_core.functions import is_over_batch, load_function

_EXAMPLES = TypeAdapter(list[Example])
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REMEDY = "fix the function, or let it return None for a completion that cannot be scored"


def call_reward(fn: Reward, name: str, completion: str, example: Example) -> float:
    """One reward; NaN for None. Raises ValueError naming function and example when it raises or returns no number."""
    try:
        value = fn(completion, example)
    except Exception as error:
        raise ValueError(f"reward {name} raised {error!r} on example {example.id}; {_REMEDY}") from error
    return _number(value, name, example)


def call_over_batch(fn: BatchReward, name: str, completions: list[str], examples: list[Example]) -> BatchRewards:
    """The rewards of a whole batch; NaN for None. Raises ValueError naming the function, ConnectionError if it does."""
    try:
        found = fn(completions, examples)
    except ConnectionError as error:
        raise ConnectionError(f"reward {name}: {error}") from error
    except Exception as error:
        raise ValueError(f"reward {name} raised {error!r} on a batch of {len(examples)}; fix the function") from error
    if not isinstance(found, BatchRewards):
        found = BatchRewards(found, {})
    if len(found.values) != len(examples):
        raise ValueError(
            f"reward {name} returned {len(found.values)} values for {len(examples)} completions; {_REMEDY}"
        )
    pairs = zip(found.values, examples, strict=True)
    return BatchRewards([_number(value, name, example) for value, example in pairs], found.metrics)


def _number(value: object, name: str, example: Example) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"reward {name} returned {value!r} for example {example.id}; {_REMEDY}")
    return float(value)


def call_extractor(fn: Extractor, name: str, completion: str, example: Example) -> str | None:
    """The answer in a completion. Raises ValueError naming function and example when it raises or returns no text."""
    try:
        text = fn(completion, example)
    except Exception as error:
        raise ValueError(f"{name} raised {error!r} on example {example.id}; fix the function") from error
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} returned {text!r} for example {example.id}; let it return a text, or None for none")
    return text


@dataclass(frozen=True)
class Called:
    """A reward function as the owner has asked for it, and the function that says what it takes for the answer."""

    config: FunctionConfig
    reward: Callable
    extractor_name: str | None
    extractor: Extractor | None
    is_over_batch: bool

    def on_one(self, completion: str, example: Example) -> dict:
        """The answer to one call."""
        return self._answer(call_reward(self.reward, self.config.fn, completion, example), completion, example)

    def on_batch(self, completions: list[str], examples: list[Example]) -> Iterator[dict]:
        """The metrics of a batch, and then the answers to all of its calls."""
        found = call_over_batch(self.reward, self.config.fn, completions, examples)
        yield {"metrics": dict(found.metrics)}
        yield from map(self._answer, found.values, completions, examples)

    def _answer(self, value: float | None, completion: str, example: Example) -> dict:
        extracted = None
        if self.extractor is not None and self.extractor_name is not None:
            extracted = call_extractor(self.extractor, self.extractor_name, completion, example)
        return {"value": None if value is None or math.isnan(value) else value, "extracted": extracted}


def answers(requests: Iterator[bytes]) -> Iterator[dict]:
    """What is said to the owner: that the functions are there, then one answer for each call, in order."""
    functions = []
    for asked in json.loads(next(requests)):
        name, extractor = asked["extractor"], None
        config = FunctionConfig(fn=asked["fn"], kwargs=asked["kwargs"])
        try:
            reward = load_function(config, "reward")
            if name is not None:
                extractor = load_function(config.model_copy(update={"fn": name}), "reward")
        except Exception as error:
            yield {"error": f"reward {config.fn} cannot be imported: {error!r}; fix its module"}
            return
        functions.append(Called(config, reward, name, extractor, is_over_batch(config, "reward")))
    yield {"ready": True}
    for line, examples_line in zip(requests, requests, strict=False):
        calls, examples = json.loads(line), _EXAMPLES.validate_json(examples_line)
        try:
            if functions[calls[0][0]].is_over_batch:
                yield from functions[0].on_batch([completion for _, completion in calls], examples)
                continue
            for (index, completion), example in zip(calls, examples, strict=True):
                yield functions[index].on_one(completion, example)
        except (ValueError, ConnectionError) as error:
            yield {"error": str(error), "is_transient": isinstance(error, ConnectionError)}
            return


def main() -> None:
    """Serve the owner at the other end of the channel until it closes."""
    # A closed channel is noticed between two calls only; a function that never returns must not outlive the owner.
    # Linux sends this signal when the thread that started this process ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Bytecode is told from newer source by whole seconds and size: a quick edit would go on with the old function.
    sys.dont_write_bytecode = True
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)  # else a process that a reward leaves behind would hold it open
    os.dup2(2, 1)  # what a reward prints is read as a log
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    faulthandler.enable()  # the log says where a function crashed
    try:
        with channel.makefile("rb") as requests:
            for answer in answers(iter(requests)):
                channel.sendall(json.dumps(answer).encode() + b"\n")
    except ConnectionError:
        pass  # the owner is gone


if __name__ == "__main__":
    main()
