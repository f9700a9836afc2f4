"""Running a program that nobody has read: a process of its own without network, secrets, files, children, or much time.

The kernel keeps it in: user, network and IPC namespaces, Landlock for files, seccomp for processes and signals,
resource limits, an empty environment, a temporary directory. It can read the standard library and nothing else, and
write in its directory alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge_core.rewards.sandbox_child import CANNOT_ISOLATE

MAX_OUTPUT_BYTES = 1_000_000
_CHILD = Path(__file__).with_name("sandbox_child.py")


class SandboxError(RuntimeError):
    """This machine cannot keep a program in."""


@dataclass(frozen=True)
class Outcome:
    """What became of a program. `finished`: it came to its end, and to that of the check, by itself."""

    status: Literal["finished", "failed", "timeout", "too much output"]
    stdout: str
    stderr: str


def run_python(
    program: str,
    *,
    stdin: str = "",
    check: str = "",
    seconds: float = 5.0,
    megabytes: int = 512,
    is_isolated: bool = True,
) -> Outcome:
    """Run a program, then `check` (further statements, such as assertions) in its namespace.

    `seconds` bounds wall and CPU time together. Raises SandboxError when isolation is wanted and not to be had.
    """
    said, to_say = os.pipe()
    order = {
        "program": program,
        "check": check,
        "word": (word := secrets.token_hex(16)),
        "word_to": to_say,
        "seconds": math.ceil(seconds),
        "megabytes": megabytes,
        "readable": sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}),
        "is_isolated": is_isolated,
    }
    with tempfile.TemporaryDirectory(prefix="forge-sandbox-") as directory, tempfile.TemporaryFile() as given:
        given.write(json.dumps(order).encode() + b"\n" + stdin.encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", _CHILD],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd=directory,
            pass_fds=[to_say],
            start_new_session=True,
        )
        os.close(to_say)
        try:
            status, stdout, stderr = _follow(process, time.monotonic() + seconds)
            has_ended = os.read(said, len(word)) == word.encode()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(said)
    if process.returncode == CANNOT_ISOLATE:
        raise SandboxError(
            f"{stderr.strip()}; code rewards need Linux 5.13 with user namespaces and Landlock (a container must allow "
            "them), or isolation: none, which lets a completion do what it likes here"
        )
    if process.returncode == -signal.SIGXCPU:
        status = "timeout"
    elif status == "ended":
        status = "finished" if has_ended and process.returncode == 0 else "failed"
    return Outcome(status, stdout, stderr)


def _follow(process: subprocess.Popen, deadline: float) -> tuple:
    """How a process ended, with both outputs; it is killed at the deadline, and when it says too much."""
    outputs: dict[object, bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    status = "ended"
    with selectors.DefaultSelector() as selector:
        for stream in outputs:
            selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
        while selector.get_map() and status == "ended":
            remaining = deadline - time.monotonic()
            ready = selector.select(max(0.0, remaining))
            if not ready and remaining <= 0:
                status = "timeout"
            for key, _ in ready:
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fileobj)
                outputs[key.fileobj] += piece
                if len(outputs[key.fileobj]) > MAX_OUTPUT_BYTES:
                    status = "too much output"
    if status != "ended":
        process.kill()
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:  # it has closed its outputs and goes on
        status = "timeout"
        process.kill()
    stdout, stderr = (bytes(output[:MAX_OUTPUT_BYTES]).decode(errors="replace") for output in outputs.values())
    return status, stdout, stderr
