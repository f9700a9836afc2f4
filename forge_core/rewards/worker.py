"""A process that calls reward functions for the owner of `forge_core.rewards.pool`, and may be killed at any time.

    python -m forge_core.rewards.worker FD

FD is one end of a socket pair that carries JSON, one value a line. The owner first sends the functions, answered by
{"ready": true} once they are imported, then batches of two lines: calls [[function index, completion], ...] and their
examples. Every call gets its answer as soon as it has one: {"value": number or null} or {"error": message}.

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
from forge_core.examples import Example, Reward
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


def answers(requests: Iterator[bytes]) -> Iterator[dict]:
    """What is said to the owner: that the functions are there, then one answer for each call, in order."""
    configs = [FunctionConfig.model_validate(config) for config in json.loads(next(requests))]
    functions = []
    for config in configs:
        try:
            functions.append(load_function(config, "reward"))
        except Exception as error:
            yield {"error": f"reward {config.fn} cannot be imported: {error!r}; fix its module"}
            return
    yield {"ready": True}
    for calls, examples in zip(requests, requests, strict=False):
        for (index, completion), example in zip(json.loads(calls), _EXAMPLES.validate_json(examples), strict=True):
            try:
                value = call_reward(functions[index], configs[index].fn, completion, example)
            except ValueError as error:
                yield {"error": str(error)}
                return
            yield {"value": None if math.isnan(value) else value}


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
