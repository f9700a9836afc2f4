"""Stage `evaluate`: how often a policy is right, by the generator and reward code that training uses.

Every problem is answered greedily once and sampled `pass_k` times. The artifact has `samples.jsonl`, a line a problem
with all its completions, and `report.json`: settings, metrics, accuracy by difficulty, and what is not there and why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import islice

from forge_core.artifacts import Manifest
from forge_core.chat import encode_prompt
from forge_core.config import RewardConfig
from forge_core.difficulty import by_difficulty
from forge_core.eval_config import EvalConfig
from forge_core.evaluations import EvaluationReport
from forge_core.examples import Example, pick_examples
from forge_core.functions import find_extractor
from forge_core.generator import Completion
from forge_core.graded import GradedCompletion, GradedProblem, Metrics, describe
from forge_core.jobs import EvaluateJob
from forge_core.rewards.answers import all_declared
from forge_core.rewards.pool import RewardPool, RewardValues
from forge_core.seeds import derive_seed
from forge_core.stages.engine import engine_with
from forge_core.stages.score import reward_pool
from forge_core.stages.workspace import Stopwatch, Workspace

logger = logging.getLogger(__name__)


def run(job: EvaluateJob, workspace: Workspace) -> Manifest:
    """Evaluate on the first `num_examples` problems; every problem counts once."""
    watch, settings = Stopwatch(), job.evaluation
    with watch("load"):
        engine = engine_with(job, workspace)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        require_enough(int(dataset.summary["dataset/examples"]), settings)
        examples = pick_examples(dataset_dir / "examples.jsonl", range(settings.num_examples))
    extractor = find_extractor(settings.reward)
    pool = _reward_pool(job, extractor, workspace)  # it imports the reward while the engine generates
    prompts = [encode_prompt(engine.tokenizer, example.prompt, job.chat) for example in examples]
    seeds = [derive_seed("evaluate", job.seed, place) for place in range(len(examples))]
    with watch("generate"):
        answers = engine.generator.generate(prompts, num_completions=1, sampling=settings.greedy, seeds=seeds)
        samples = engine.generator.generate(
            prompts, num_completions=settings.pass_k, sampling=settings.sampled, seeds=seeds
        )
    groups = [(answer, *attempts) for [answer], attempts in zip(answers, samples, strict=True)]
    with watch("score"):
        problems, scored = judge(examples, groups, pool)
        report = report_on(problems, job, extractor)
    workspace.injection.reach("work")
    num_tokens = sum(len(one.token_ids) for group in groups for one in group)
    with workspace.directory() as directory:
        (directory / "samples.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in problems))
        (directory / "report.json").write_text(report.model_dump_json(indent=1) + "\n")
        summary = tracked(report, scored)
        summary["tokens_per_second/evaluate"] = num_tokens / watch.seconds["generate"]
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def require_enough(num_held: int, settings: EvalConfig) -> None:
    """Raise ValueError when a dataset has too few problems for an evaluation."""
    if num_held < settings.num_examples:
        raise ValueError(
            f"evals.{settings.name}.num_examples is {settings.num_examples}, but the dataset holds {num_held}; lower it"
        )


def _reward_pool(job: EvaluateJob, extractor: str | None, workspace: Workspace) -> RewardPool:
    reward, limit = job.evaluation.reward, job.evaluation.reward_timeout_seconds
    config = RewardConfig(fn=reward.fn, kwargs=reward.kwargs, timeout_seconds=limit)
    extractors = {} if extractor is None else {reward.fn: extractor}
    return reward_pool(workspace, (config,), {reward.fn: job.source_sha256}, extractors)


def judge(
    examples: Sequence[Example], groups: Sequence[tuple[Completion, ...]], pool: RewardPool
) -> tuple[list[GradedProblem], RewardValues]:
    """Every problem graded, its completions being the greedy answer and the samples; what has no score is wrong."""
    scored = pool.score([(one.text, example) for example, group in zip(examples, groups, strict=True) for one in group])
    outcomes = zip(scored.values, scored.extracted, strict=True)
    problems = []
    for example, group in zip(examples, groups, strict=True):
        answer, *samples = [
            _graded(one, reward, extracted)
            for one, ([reward], [extracted]) in zip(group, islice(outcomes, len(group)), strict=True)
        ]
        problems.append(
            GradedProblem(
                id=example.id,
                answer=example.answer,
                difficulty=example.metadata.get("difficulty"),
                samples=tuple(samples),
                **answer.model_dump(),
            )
        )
    return problems, scored


def _graded(completion: Completion, reward: float, extracted: str | None) -> GradedCompletion:
    return GradedCompletion(
        completion=completion.text,
        is_right=reward == 1.0,
        reward=None if math.isnan(reward) else reward,
        extracted=extracted,
        num_declared=len(all_declared(completion.text)),
        finish_reason=completion.finish_reason,
        num_tokens=len(completion.token_ids),
    )


def report_on(problems: Sequence[GradedProblem], job: EvaluateJob, extractor: str | None) -> EvaluationReport:
    """Settings and metrics, with a note for everything that was asked for and is not there."""
    settings, notes = job.evaluation, []
    if extractor is None:
        notes.append(
            f"no majority@{settings.pass_k}: beside the reward {settings.reward.fn} there is no function "
            f"{settings.reward.fn.rpartition(':')[2]}_answer that says what it takes for the answer"
        )
    for note in notes:
        logger.info("evaluation %s has %s", settings.name, note)
    return EvaluationReport(
        name=settings.name,
        policy=job.policy.digest,
        dataset=job.dataset.digest,
        num_examples=len(problems),
        greedy=settings.greedy,
        sampled=settings.sampled,
        num_samples=settings.pass_k,
        seed=job.seed,
        chat=job.chat,
        reward=settings.reward,
        extractor=extractor,
        metrics=describe(problems, votes=extractor is not None),
        difficulty=by_difficulty(problems),
        notes=tuple(notes),
    )


def tracked(report: EvaluationReport, scored: RewardValues) -> Metrics:
    """The numbers of a report under their tracking names, and how many rewards failed."""
    found = report.metrics | {"timeouts": scored.num_timeouts, "crashes": scored.num_crashes} | scored.metrics
    for one in report.difficulty:
        found |= one.metrics
    return {f"eval/{report.name}/{name}": value for name, value in found.items()}
