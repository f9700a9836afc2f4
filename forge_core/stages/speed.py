"""Stage `speed`: tokens per second, memory and use of the accelerator of a policy and of its quantized form.

Both engines are there at once and take turns.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch

from forge_core.artifacts import Manifest
from forge_core.chat import encode_prompt, load_tokenizer
from forge_core.config import GeneratorConfig, SamplingConfig
from forge_core.examples import read_examples
from forge_core.generator import Generator
from forge_core.jobs import SpeedJob
from forge_core.seeds import derive_seed
from forge_core.stages.meter import BusyMeter, memory_in_use
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: SpeedJob, workspace: Workspace) -> Manifest:
    """Rounds of A B, B A, A B, ... after one that warms both up; the ratio is the median of the rounds' ratios."""
    watch = Stopwatch()
    if (engine := workspace.held.pop("engine", None)) is not None:
        engine.generator.close()
    with watch("load"):
        places = [workspace.fetch(ref)[1] for ref in (job.policy, job.quantized)]
        config = job.generator
        if torch.cuda.is_available():
            config = config.model_copy(update={"overrides": {"gpu_memory_utilization": 0.4} | config.overrides})
        started = [_started(place, config, job.seed) for place in places]
        generators = [generator for generator, _ in started]
        tokenizer = load_tokenizer(places[0])
        _, dataset_dir = workspace.fetch(job.dataset)
        examples = read_examples(dataset_dir / "examples.jsonl")[: job.num_prompts]
    prompts = [encode_prompt(tokenizer, example.prompt) for example in examples]
    rounds: list[tuple[float, float]] = []
    meters = (BusyMeter(), BusyMeter())
    with watch("generate"):
        for number in range(job.num_rounds + 1):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            rates = [0.0, 0.0]
            for which in order:
                with meters[which].measuring():
                    rates[which] = _tokens_per_second(generators[which], prompts, job, number)
            rounds.append((rates[0], rates[1]))
    for generator in generators:
        generator.close()
    counted = rounds[1:]
    workspace.injection.reach("work")
    with workspace.directory() as directory:
        (directory / "rounds.json").write_text(json.dumps(counted) + "\n")
        summary = describe(counted)
        for which, (_, num_bytes), meter in zip(("before", "after"), started, meters, strict=True):
            summary |= {f"quantize/engine_bytes/{which}": num_bytes, f"quantize/busy/{which}": meter.busy}
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def _started(hf_dir: Path, config: GeneratorConfig, seed: int) -> tuple[Generator, int]:
    """An engine, and the memory that came with it: weights, KV cache and buffers."""
    before = memory_in_use()
    generator = Generator(hf_dir, config=config, seed=seed % 2**31)
    return generator, memory_in_use() - before


def _tokens_per_second(generator: Generator, prompts: list[list[int]], job: SpeedJob, number: int) -> float:
    seeds = [derive_seed("speed", job.seed, number, place) for place in range(len(prompts))]
    sampling = SamplingConfig(max_tokens=job.max_tokens)
    started = time.perf_counter()
    groups = generator.generate(prompts, num_completions=1, sampling=sampling, seeds=seeds)
    seconds = time.perf_counter() - started
    return sum(len(one.token_ids) for [one] in groups) / seconds


def describe(rounds: list[tuple[float, float]]) -> dict[str, float]:
    """Medians over the rounds."""
    return {
        "quantize/tokens_per_second/before": statistics.median(before for before, _ in rounds),
        "quantize/tokens_per_second/after": statistics.median(after for _, after in rounds),
        "quantize/speed_ratio": statistics.median(after / before for before, after in rounds),
    }
