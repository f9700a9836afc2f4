"""Stage `evaluate`: greedy accuracy and pass@k of a policy, by the generator and reward code that training uses."""

from __future__ import annotations

import json
import math
import statistics

from forge_core.artifacts import Manifest
from forge_core.chat import encode_prompt
from forge_core.config import SamplingConfig
from forge_core.examples import read_examples
from forge_core.functions import load_function
from forge_core.jobs import EvaluateJob
from forge_core.rollouts import RolloutTexts
from forge_core.seeds import derive_seed
from forge_core.stages.engine import engine_with
from forge_core.stages.score import call_reward
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: EvaluateJob, workspace: Workspace) -> Manifest:
    """Evaluate on the first `num_examples` problems; every problem counts once."""
    watch, settings = Stopwatch(), job.evaluation
    with watch("load"):
        engine = engine_with(job, workspace)
        _, dataset_dir = workspace.fetch(job.dataset)
        examples = read_examples(dataset_dir / "examples.jsonl")[: settings.num_examples]
    if len(examples) < settings.num_examples:
        raise ValueError(
            f"evals.{settings.name}.num_examples is {settings.num_examples}, but the dataset holds {len(examples)}; "
            "lower it"
        )
    prompts = [encode_prompt(engine.tokenizer, example.prompt) for example in examples]
    seeds = [derive_seed("evaluate", job.seed, place) for place in range(len(examples))]
    greedy = SamplingConfig(max_tokens=settings.max_tokens, temperature=0.0)
    sampled = SamplingConfig(max_tokens=settings.max_tokens, temperature=settings.temperature)
    with watch("generate"):
        answers = engine.generator.generate(prompts, num_completions=1, sampling=greedy, seeds=seeds)
        samples = engine.generator.generate(prompts, num_completions=settings.pass_k, sampling=sampled, seeds=seeds)
    fn = load_function(settings.reward, "reward")
    rows = []
    for example, [answer], attempts in zip(examples, answers, samples, strict=True):
        texts = [RolloutTexts(example, attempt.text, attempt.finish_reason) for attempt in (answer, *attempts)]
        is_right = [call_reward(fn, settings.reward, text) == 1.0 for text in texts]
        rows.append(
            {
                "id": example.id,
                "answer": example.answer,
                "completion": answer.text,
                "is_right": is_right[0],
                "finish_reason": answer.finish_reason,
                "num_tokens": len(answer.token_ids),
                "num_right_of_k": sum(is_right[1:]),
            }
        )
    num_tokens = sum(len(sample.token_ids) for group in (*answers, *samples) for sample in group)
    with workspace.directory() as directory:
        (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = describe(rows, settings.name, settings.pass_k)
        summary["tokens_per_second/evaluate"] = num_tokens / watch.seconds["generate"]
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def describe(rows: list[dict], name: str, k: int) -> dict[str, float]:
    """Accuracy, pass@1 and pass@k under their tracking names."""
    return {
        f"eval/{name}/accuracy": statistics.fmean(row["is_right"] for row in rows),
        f"eval/{name}/pass_at_1": statistics.fmean(pass_at_k(k, row["num_right_of_k"], 1) for row in rows),
        f"eval/{name}/pass_at_{k}_of_{k}": statistics.fmean(pass_at_k(k, row["num_right_of_k"], k) for row in rows),
        f"eval/{name}/completion_length": statistics.fmean(row["num_tokens"] for row in rows),
        f"eval/{name}/truncated_fraction": statistics.fmean(row["finish_reason"] == "length" for row in rows),
        f"eval/{name}/num_examples": len(rows),
    }


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased chance that one of k draws is right, 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374); needs n >= k."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
