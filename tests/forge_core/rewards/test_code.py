"""Programs as completions: what passes, and what the sandbox keeps from them."""

from __future__ import annotations

import errno
import platform
import subprocess
import time
from pathlib import Path

import pytest

from forge_core.examples import Example, Message
from forge_core.rewards.code import code
from forge_core.rewards.sandbox import run_python

ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
CASES = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "10 -4\n", "stdout": "6"}]


def example(tests: object) -> Example:
    metadata = {"tests": tests} if tests else {}
    return Example.model_validate({"id": "e", "messages": [Message(role="user", content="?")], "metadata": metadata})


@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        (ADD, CASES, 1),
        (f"First:\n```\nprint(0)\n```\nbetter:\n{ADD}", CASES, 1),
        (ADD.replace("a + b", "3"), CASES, 0),
        (ADD.replace("print", "raise ValueError #"), CASES, 0),
        ("no program", CASES, 0),
        (f"<think>{ADD}</think>", CASES, 0),
        ("```python\ndef double(n):\n    return 2 * n\n```", "assert double(3) == 6", 1),
        ("```python\ndef double(n):\n    return n\n```", "assert double(3) == 6", 0),
        ("```python\nimport sys\nsys.exit(0)\n```", "assert False", 0),
        ("```python\nimport os\nos._exit(0)\n```", "assert False", 0),
        ("```python\nimport os, sys\nprint(3)\nsys.stdout.flush()\nos._exit(0)\n```", CASES[:1], 0),  # it never ended
    ],
)
def test_a_program_is_right_when_it_passes_every_test(completion, tests, expected):
    assert code(completion, example(tests)) == expected


def test_part_of_the_tests_is_paid_for_on_request():
    assert code(ADD.replace("a + b", "3"), example(CASES), partial=True) == 0.5


def test_an_example_without_tests_is_an_error():
    with pytest.raises(ValueError, match=r"example e has no metadata\.tests"):
        code(ADD, example(None))


def test_a_program_has_no_network_no_secrets_and_no_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    (tmp_path / "secret").write_text("planted")
    program = f"""
import os, socket
print(dict(os.environ))
for what in (
    lambda: socket.create_connection(("127.0.0.1", 22), 1),
    lambda: socket.create_connection(("10.0.0.1", 80), 1),
    lambda: open({str(tmp_path / "secret")!r}).read(),
    lambda: open("/etc/passwd").read(),
    lambda: open("/proc/1/environ").read(),
    lambda: open({str(tmp_path / "new")!r}, "w"),
    lambda: os.listdir("/"),
    lambda: os.kill(os.getppid(), 9),
    lambda: os.kill(os.getppid(), 0),
    lambda: os.remove({str(tmp_path / "secret")!r}),
):
    try:
        print("GOT", what())
    except OSError as error:
        print("refused")
open("mine", "w").write("x")
print(open("mine").read(), sum(__import__("math").sqrt(4) for _ in range(2)))
"""
    outcome = run_python(program)
    assert outcome.status == "finished", outcome.stderr
    assert outcome.stdout.count("refused") == 10
    assert "GOT" not in outcome.stdout
    assert "planted" not in outcome.stdout
    assert "x 4.0" in outcome.stdout
    assert (tmp_path / "secret").read_text() == "planted"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)", "timeout"),
        ("x = bytearray(2**31)", "failed"),
        ("import os\nos.fork()", "failed"),
        ("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 60'])", "failed"),
        ("import threading\nthreading.Thread(target=print).start()", "failed"),
        ("while True: print('x' * 1000)", "too much output"),
        ("open('big', 'wb').write(bytes(2**26))", "failed"),
        ("import ctypes\nctypes.string_at(0)", "failed"),
    ],
)
def test_a_program_that_wants_too_much_ends_in_time_and_alone(program: str, status: str):
    started = time.monotonic()
    outcome = run_python(program, seconds=2 if status == "timeout" else 20, megabytes=256)
    assert outcome.status == status, outcome.stderr
    assert time.monotonic() - started < 30
    found = subprocess.run(["pgrep", "-f", "sandbox_child"], check=False, capture_output=True, text=True)
    assert found.stdout == ""


def test_the_end_of_its_cpu_time_is_a_timeout_too():
    """Two threads use up their seconds before the clock does (one core: at the same time)."""
    busy = "import hashlib, threading\ndef work():\n    while True: hashlib.sha256(bytes(2**20))\n"
    outcome = run_python(busy + "threading.Thread(target=work).start()\nwork()", seconds=2, is_isolated=False)
    assert outcome.status == "timeout"


def test_what_a_program_leaves_behind_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_python("open('left', 'w').write('x')")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only this machine numbers its system calls twice")
def test_the_second_numbering_of_system_calls_is_no_way_around_the_filter():
    getpid = 0x40000000 | 39
    program = f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.syscall({getpid}), ctypes.get_errno())"
    assert run_python(program).stdout == f"-1 {errno.EPERM}\n"
