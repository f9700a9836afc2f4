"""Stage `evaluate`: greedy accuracy and pass@k of a policy, by the generator and reward code that training uses."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence

from forge_core.artifacts import Manifest
from forge_core.chat import encode_prompt
from forge_core.config import RewardConfig, SamplingConfig
from forge_core.examples import Example, pick_examples
from forge_core.generator import Completion
from forge_core.jobs import EvaluateJob
from forge_core.rewards.pool import RewardPool, RewardValues
from forge_core.seeds import derive_seed
from forge_core.stages.engine import engine_with
from forge_core.stages.score import reward_pool
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: EvaluateJob, workspace: Workspace) -> Manifest:
    """Evaluate on the first `num_examples` problems; every problem counts once."""
    watch, settings = Stopwatch(), job.evaluation
    with watch("load"):
        engine = engine_with(job, workspace)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        num_held = int(dataset.summary["dataset/examples"])
        if num_held < settings.num_examples:
            raise ValueError(
                f"evals.{settings.name}.num_examples is {settings.num_examples}, but the dataset holds {num_held}; "
                "lower it"
            )
        examples = pick_examples(dataset_dir / "examples.jsonl", range(settings.num_examples))
    pool = _reward_pool(job, workspace)  # it imports the reward while the engine generates
    prompts = [encode_prompt(engine.tokenizer, example.prompt, job.chat) for example in examples]
    seeds = [derive_seed("evaluate", job.seed, place) for place in range(len(examples))]
    greedy = SamplingConfig(max_tokens=settings.max_tokens, temperature=0.0)
    sampled = SamplingConfig(max_tokens=settings.max_tokens, temperature=settings.temperature)
    with watch("generate"):
        answers = engine.generator.generate(prompts, num_completions=1, sampling=greedy, seeds=seeds)
        samples = engine.generator.generate(prompts, num_completions=settings.pass_k, sampling=sampled, seeds=seeds)
    groups = [(answer, *attempts) for [answer], attempts in zip(answers, samples, strict=True)]
    with watch("score"):
        rows, scored = judge(examples, groups, pool)
    workspace.injection.reach("work")
    num_tokens = sum(len(one.token_ids) for group in groups for one in group)
    with workspace.directory() as directory:
        (directory / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = describe(rows, scored, settings.name, settings.pass_k)
        summary["tokens_per_second/evaluate"] = num_tokens / watch.seconds["generate"]
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def _reward_pool(job: EvaluateJob, workspace: Workspace) -> RewardPool:
    reward, limit = job.evaluation.reward, job.evaluation.reward_timeout_seconds
    config = RewardConfig(fn=reward.fn, kwargs=reward.kwargs, timeout_seconds=limit)
    return reward_pool(workspace, (config,), {reward.fn: job.source_sha256})


def judge(
    examples: Sequence[Example], groups: Sequence[tuple[Completion, ...]], pool: RewardPool
) -> tuple[list[dict], RewardValues]:
    """A row for each problem, whose completions are the greedy answer and the samples; what has no score is wrong."""
    completions = [(one.text, example) for example, group in zip(examples, groups, strict=True) for one in group]
    scored = pool.score(completions)
    rewards = iter(scored.values)
    rows = []
    for example, (answer, *attempts) in zip(examples, groups, strict=True):
        is_right, *are_right = [next(rewards) == [1.0] for _ in (answer, *attempts)]
        rows.append(
            {
                "id": example.id,
                "answer": example.answer,
                "completion": answer.text,
                "is_right": is_right,
                "finish_reason": answer.finish_reason,
                "num_tokens": len(answer.token_ids),
                "num_right_of_k": sum(are_right),
            }
        )
    return rows, scored


def describe(rows: list[dict], scored: RewardValues, name: str, k: int) -> dict[str, float]:
    """Accuracy with its 95 % interval, pass@1 and pass@k under their tracking names, and how many rewards failed."""
    low, high = wilson_interval(sum(row["is_right"] for row in rows), len(rows))
    return {
        f"eval/{name}/accuracy": statistics.fmean(row["is_right"] for row in rows),
        f"eval/{name}/accuracy_low": low,
        f"eval/{name}/accuracy_high": high,
        f"eval/{name}/pass_at_1": statistics.fmean(pass_at_k(k, row["num_right_of_k"], 1) for row in rows),
        f"eval/{name}/pass_at_{k}_of_{k}": statistics.fmean(pass_at_k(k, row["num_right_of_k"], k) for row in rows),
        f"eval/{name}/completion_length": statistics.fmean(row["num_tokens"] for row in rows),
        f"eval/{name}/truncated_fraction": statistics.fmean(row["finish_reason"] == "length" for row in rows),
        f"eval/{name}/num_examples": len(rows),
        f"eval/{name}/timeouts": scored.num_timeouts,
        f"eval/{name}/crashes": scored.num_crashes,
        **{f"eval/{name}/{metric}": value for metric, value in scored.metrics.items()},
    }


def wilson_interval(num_right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Where the true accuracy lies with 95 % confidence (E. B. Wilson, 1927); never outside of [0, 1]."""
    accuracy = num_right / count
    centre = (accuracy + z**2 / (2 * count)) / (1 + z**2 / count)
    reach = z / (1 + z**2 / count) * math.sqrt(accuracy * (1 - accuracy) / count + z**2 / (4 * count**2))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased chance that one of k draws is right, 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374); needs n >= k."""
    if num_samples < k:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {num_samples}")
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
