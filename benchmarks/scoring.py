"""How many answers a second one core scores, by reward; through the reward processes, and without them.

    python -m benchmarks.scoring [--path gsm8k/test.jsonl] [--count 4000]

`--path` is a file of GSM8K; without it, problems of the same form are made up.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator

from forge_core.config import RewardConfig
from forge_core.datasets import gsm8k
from forge_core.examples import Example, Message
from forge_core.functions import load_function
from forge_core.rewards.pool import RewardPool

WANTED = 2000  # answers a second, by one core: 512 completions then take a quarter of a second
REWARDS = (
    RewardConfig(fn="gsm8k"),
    RewardConfig(fn="gsm8k", kwargs={"method": "strict"}),
    RewardConfig(fn="exact_number"),
    RewardConfig(fn="boxed"),
    RewardConfig(fn="thinking"),
    RewardConfig(fn="math"),
)


def made_up(count: int) -> Iterator[Example]:
    """Word problems with worked solutions of about GSM8K's length."""
    numbers = random.Random(0)
    for index in range(count):
        lines, total = [], 0
        for _ in range(5):
            a, b = numbers.randint(2, 99), numbers.randint(2, 99)
            total += a * b
            lines.append(f"She packs {a} boxes of {b} apples each, which makes {a}*{b}=<<{a}*{b}={a * b}>>{a * b}.")
        solution = Message(role="assistant", content="\n".join([*lines, f"#### {total:,}"]))
        yield Example(id=str(index), messages=(Message(role="user", content="How many?"), solution), answer=str(total))


def main() -> None:
    """Command line; exits with 1 when the GSM8K verifier is slower than wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scoring", description=__doc__)
    parser.add_argument("--path", help="a JSON-lines file of GSM8K")
    parser.add_argument("--count", type=int, default=4000, help="answers scored")
    arguments = parser.parse_args()
    examples = list(gsm8k(path=arguments.path) if arguments.path else made_up(arguments.count))
    rows = [(examples[place % len(examples)]) for place in range(arguments.count)]
    answers = [(example.messages[-1].content, example) for example in rows]
    rates = {}
    for reward in REWARDS:
        function, count = load_function(reward, "reward"), len(answers) // (10 if reward.fn == "math" else 1)
        started = time.process_time()
        right = sum(function(completion, example) for completion, example in answers[:count])
        seconds = time.process_time() - started
        name = " ".join([reward.fn, *map(str, reward.kwargs.values())])
        rates[name] = count / seconds
        sys.stdout.write(f"{name:<16} {count / seconds:>10,.0f} answers/s/core, {right / count:.1%} right\n")
    pool = RewardPool(REWARDS[:1], num_workers=1)
    pool.score(answers[:1])  # starts the process
    started = time.perf_counter()
    pool.score(answers)
    seconds = time.perf_counter() - started
    pool.close()
    sys.stdout.write(f"{'gsm8k, process':<16} {len(answers) / seconds:>10,.0f} answers/s of wall time, one process\n")
    sys.exit(rates["gsm8k"] < WANTED)


if __name__ == "__main__":
    main()
