"""Rewards that hang, crash, print and leave processes behind: what is lost is one score, and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge_core.config import RewardConfig
from forge_core.examples import Example, Message
from forge_core.rewards.pool import RewardPool

REPO = Path(__file__).resolve().parents[3]
REWARDS = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path

def number(completion, example):
    "The completion as a number, None when it is empty; other words are misdeeds."
    if completion in ("loop", "hang in C"):
        Path(os.environ["NOTES"]).write_text("busy")
    match completion:
        case "": return None
        case "loop":
            while True: pass
        case "hang in C":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
        case "exit": os._exit(3)
        case "sys.exit": sys.exit()
        case "segfault": ctypes.string_at(0)
        case "raise": raise KeyError("solution")
        case "text": return "1"
        case "print":
            print('{"value": 5.0}', flush=True)
            os.write(1, b'{"error": "printed"}\\n')
            subprocess.run(["echo", '{"value": 6.0}'])
            return float(sys.stdin.read() == "")
        case "children":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(os.environ["NOTES"]).write_text(str(child.pid))
            child.wait()
        case "torch": return float("torch" in sys.modules)
    return float(completion)

def length(completion, example, *, scale=1.0):
    return len(completion) * scale

def equation(completion, example):
    from math_verify import parse, verify  # without its own limits, which need signal.alarm
    found, gold = (parse(f"${text}$", parsing_timeout=None) for text in (completion, example.answer))
    return float(verify(gold, found, timeout_seconds=None))

def equation_with_alarm(completion, example):
    from math_verify import parse, verify
    return float(verify(parse(f"${example.answer}$"), parse(f"${completion}$")))
"""
EXAMPLE = Example(id="e7", messages=(Message(role="user", content="1+1="),), answer="2")


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))


@pytest.fixture
def start() -> Iterator[Callable[..., RewardPool]]:
    """Start pools that are closed after the test, and leave nothing behind."""
    pools: list[RewardPool] = []

    def _start(*fns: str, num_workers: int = 1, timeout_seconds: float = 60.0) -> RewardPool:
        rewards = [RewardConfig(fn=f"hostile:{fn}", timeout_seconds=timeout_seconds) for fn in fns]
        pools.append(RewardPool(rewards, num_workers=num_workers))
        return pools[-1]

    yield _start
    pids = [pid for pool in pools for pid in pool.pids]
    for pool in pools:
        pool.close()
    assert not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest's own limit ends this
        time.sleep(0.01)


def rows(*completions: str) -> list[tuple[str, Example]]:
    return [(completion, EXAMPLE) for completion in completions]


def column(values: list[list[float]], place: int = 0) -> list[float | None]:
    """One function's rewards, None in place of NaN so that lists compare."""
    return [None if math.isnan(row[place]) else row[place] for row in values]


def test_rewards_of_several_functions_come_back_in_order(start):
    scored = start("number", "length").score(rows("1", "", "2.5", "-3"))
    assert column(scored.values) == [1.0, None, 2.5, -3.0]
    assert column(scored.values, 1) == [1.0, 0.0, 3.0, 2.0]
    assert (scored.num_timeouts, scored.num_crashes) == (0, 0)


def test_words_of_any_kind_reach_the_function(start):
    completions = ["a\nb", "\x00", "\ud800", "\N{SNOWMAN}" * 3, "x" * 3_000_000, '"]']  # more than a socket buffers
    assert column(start("length").score(rows(*completions)).values) == [3, 1, 1, 3, 3_000_000, 2]


@pytest.mark.parametrize("misdeed", ["loop", "hang in C"])
def test_a_reward_that_hangs_costs_its_own_score_only(start, misdeed, caplog):
    pool = start("number", "length", timeout_seconds=2)
    first_pids = pool.pids
    scored = pool.score(rows("1", misdeed, "3", "4"))
    assert column(scored.values) == [1.0, None, 3.0, 4.0]
    assert column(scored.values, 1) == [1.0, len(misdeed), 1.0, 1.0]
    assert (scored.num_timeouts, scored.num_crashes) == (1, 0)
    warning = "reward hostile:number did not return within 2 s and was killed on example e7; this completion has no"
    assert caplog.text.count(warning) == 1
    assert not is_alive(first_pids[0])
    assert column(pool.score(rows("5")).values) == [5.0]


@pytest.mark.parametrize(
    ("misdeed", "how"),
    [
        ("exit", "exited with code 3"),
        ("sys.exit", "exited with code 0"),
        ("segfault", "was killed by SIGSEGV"),
    ],
)
def test_a_reward_that_ends_its_process_costs_its_own_score_only(start, misdeed, how, caplog):
    scored = start("number").score(rows("1", misdeed, "3", misdeed, "5"))
    assert column(scored.values) == [1.0, None, 3.0, None, 5.0]
    assert (scored.num_timeouts, scored.num_crashes) == (0, 2)
    assert caplog.text.count(f"reward hostile:number ended its process, which {how} on example e7") == 2
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("raise", r"hostile:number raised KeyError\('solution'\) on example e7; fix the function"),
        ("text", "hostile:number returned '1' for example e7"),
        ("seven", "hostile:number raised ValueError"),
    ],
)
def test_an_exception_in_a_reward_is_an_error_and_ends_the_workers(start, completion, message):
    pool = start("number")
    pids = pool.pids
    with pytest.raises(ValueError, match=message):
        pool.score(rows("1", completion, "3"))
    assert not is_alive(pids[0])
    assert column(pool.score(rows("1")).values) == [1.0]  # and the pool is fit for use


def test_a_function_none_of_whose_calls_returns_is_an_error(start):
    with pytest.raises(ValueError, match=r"hostile:number returned for none of 3 .* 0 took .* 3 ended its process"):
        start("length", "number").score(rows("exit", "segfault", "exit"))


def test_a_function_that_cannot_be_imported_is_named(start, tmp_path: Path):
    (tmp_path / "hostile.py").write_text("import no_such_module\ndef number(completion, example): ...\n")
    with pytest.raises(ValueError, match=r"reward hostile:number cannot be imported: ModuleNotFoundError"):
        start("number").score(rows("1"))


def test_a_module_that_ends_every_process_which_imports_it_is_an_error(start, tmp_path: Path):
    (tmp_path / "hostile.py").write_text("import os; os._exit(7)\ndef number(completion, example): ...\n")
    with pytest.raises(RuntimeError, match=r"hostile:number exited with code 7, 3 times in a row"):
        start("number").score(rows("1"))


def test_what_a_reward_prints_is_no_answer(start, capfd):
    scored = start("number").score(rows("1", "print", "3"))
    assert column(scored.values) == [1.0, 1.0, 3.0]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ['{"value": 5.0}', '{"error": "printed"}', '{"value": 6.0}']


def test_results_do_not_depend_on_the_number_of_workers(start):
    expected = [None if i % 9 == 0 else float(i) for i in range(300)]
    completions = ["" if value is None else str(value) for value in expected]
    for crashing in (7, 250):
        expected[crashing], completions[crashing] = None, "exit"
    one, three = (start("number", "length", num_workers=n).score(rows(*completions)) for n in (1, 3))
    assert column(one.values) == column(three.values) == expected
    assert column(one.values, 1) == column(three.values, 1) == [len(completion) for completion in completions]
    assert (one.num_crashes, three.num_crashes) == (2, 2)


def test_a_few_rows_start_one_worker_and_many_start_all(start):
    pool = start("length", num_workers=3)
    pool.score(rows(*["x"] * 64))
    first = pool.pids
    assert len(first) == 1
    pool.score(rows(*["x"] * 193))
    assert len(pool.pids) == 3
    assert pool.pids[:1] == first


def test_a_worker_that_was_killed_while_idle_costs_no_score(start):
    pool = start("number")
    pool.score(rows("1"))
    os.kill(pool.pids[0], signal.SIGKILL)
    wait_until(lambda: not is_alive(pool.pids[0]))
    scored = pool.score(rows("2", "3"))
    assert column(scored.values) == [2.0, 3.0]
    assert scored.num_crashes == 0


def test_a_killed_worker_takes_along_what_its_reward_has_started(start, tmp_path: Path):
    scored = start("number", timeout_seconds=2).score(rows("children", "2"))
    assert column(scored.values) == [None, 2.0]
    child = int((tmp_path / "notes").read_text())
    wait_until(lambda: not is_alive(child))


OWNER = """
import sys
from forge_core.config import RewardConfig
from forge_core.examples import Example, Message
from forge_core.rewards.pool import RewardPool

example = Example(id="e7", messages=(Message(role="user", content="1+1="),), answer="2")
pool = RewardPool([RewardConfig(fn="hostile:number", timeout_seconds=1000)], num_workers=1)
pool.score([("1", example)])
sys.stdout.write(f"{pool.pids[0]}\\n")
sys.stdout.flush()
pool.score([(sys.argv[1], example)])
"""


@pytest.mark.parametrize("busy_with", ["loop", "hang in C"])
def test_a_worker_dies_with_its_owner_whatever_it_is_doing(busy_with: str, tmp_path: Path):
    command = [sys.executable, "-c", OWNER, busy_with]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert os.getpgid(pid) == os.getpgid(owner.pid)
        wait_until((tmp_path / "notes").exists)
        owner.kill()
        wait_until(lambda: not is_alive(pid))


def test_workers_start_without_torch(start):
    assert column(start("number").score(rows("torch")).values) == [0.0]


BOMB = "9^{9^{9^9}}"


@pytest.mark.slow
def test_a_math_verify_bomb_among_64_costs_one_score_and_the_next_batch_nothing(start):
    """known-faults A8: the expression is evaluated in C, where no Python signal handler gets a turn."""
    pool = start("equation", timeout_seconds=5)
    completions = [BOMB if i == 20 else "2" if i % 2 else "3" for i in range(64)]
    scored = pool.score(rows(*completions))
    assert (scored.num_timeouts, scored.num_crashes) == (1, 0)
    assert column(scored.values) == [None if i == 20 else float(i % 2) for i in range(64)]
    again = pool.score(rows(*["2"] * 64))
    assert column(again.values) == [1.0] * 64
    assert (again.num_timeouts, again.num_crashes) == (0, 0)


def test_math_verify_scores_the_same_off_the_main_thread(start):
    """known-faults A7: its limits need signal.alarm, which only a main thread has; a worker calls it on one."""
    completions = rows("2", "3", "1+1", "\\frac{4}{2}")

    def score() -> list[float | None]:
        return column(start("equation_with_alarm").score(completions).values)

    assert score() == [1.0, 0.0, 1.0, 1.0]
    with ThreadPoolExecutor() as threads:
        assert threads.submit(score).result() == [1.0, 0.0, 1.0, 1.0]
    assert asyncio.run(asyncio.to_thread(score)) == [1.0, 0.0, 1.0, 1.0]
