"""A process that calls reward functions for the owner of `forge_core.rewards.pool`, and may be killed at any time.

    python -m forge_core.rewards.worker FD

FD is one end of a socket pair that carries JSON, one value a line. The owner first sends the functions, each with
`extractor`, the one that says what it takes for the answer, or null. They are answered by {"ready": true} once they are
imported. Then come batches of two lines: calls [[function index, completion], ...] and their examples. Every call gets
its answer as soon as it has one: {"value": number or null, "extracted": text or null} or {"error": message}.

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
from collections.abc import Iterator

from pydantic import TypeAdapter

from forge_core.config import FunctionConfig
from forge_core.examples import Example, Extractor, Reward
from forge_core.functions import load_function

_EXAMPLES = TypeAdapter(list[Example])
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_REMEDY = "fix the function, or let it return None for a completion that cannot be scored"


def call_reward(fn: Reward, name: str, completion: str, example: Example) -> float:
    """One reward; NaN for None. Raises ValueError naming function and example when it raises or returns no number."""
    try:
        value = fn(completion, example)
    except Exception as error:
        raise ValueError(f"reward {name} raised {error!r} on example {example.id}; {_REMEDY}") from error
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
        functions.append((config.fn, reward, name, extractor))
    yield {"ready": True}
    for calls, examples in zip(requests, requests, strict=False):
        for (index, completion), example in zip(json.loads(calls), _EXAMPLES.validate_json(examples), strict=True):
            fn, reward, name, extractor = functions[index]
            try:
                value = call_reward(reward, fn, completion, example)
                extracted = call_extractor(extractor, name, completion, example) if extractor else None
            except ValueError as error:
                yield {"error": str(error)}
                return
            yield {"value": None if math.isnan(value) else value, "extracted": extracted}


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
