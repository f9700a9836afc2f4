"""Stage `rollout`: a policy and a window of the dataset -> groups of completions with the log-probs of their tokens."""

from __future__ import annotations

import math

import torch

from forge_core.artifacts import Manifest
from forge_core.chat import encode_prompt
from forge_core.examples import Example, difficulties, pick_examples, take
from forge_core.generator import Completion
from forge_core.jobs import RolloutJob
from forge_core.rollouts import Rollouts, RolloutTexts, describe
from forge_core.seeds import derive_seed
from forge_core.stages.engine import engine_with
from forge_core.stages.workspace import Stopwatch, Workspace


def run(job: RolloutJob, workspace: Workspace) -> Manifest:
    """Sample `group_size` completions for each of `num_prompts` prompts."""
    watch = Stopwatch()
    with watch("load"):
        engine = engine_with(job, workspace)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        path, start = dataset_dir / "examples.jsonl", job.first_prompt
        window = take(
            int(dataset.summary["dataset/examples"]),
            start=start,
            count=job.num_prompts,
            seed=job.seed,
            digest=dataset.sha256_of("examples.jsonl"),
            difficulties=difficulties(path) if job.order == "easy_first" else None,
        )
        examples = pick_examples(path, window)
    encoded = [encode_prompt(engine.tokenizer, example.prompt, job.chat) for example in examples]
    places = fitting(encoded, job)
    chosen, prompts = [examples[place] for place in places], [encoded[place] for place in places]
    # A seed per place in the data stream: the same prompt samples anew in another epoch, and any replica samples alike.
    seeds = [derive_seed("rollout", job.seed, start + place) for place in places]
    with watch("generate"):
        groups = engine.generator.generate(prompts, num_completions=job.group_size, sampling=job.sampling, seeds=seeds)
    workspace.injection.reach("work")
    rollouts, num_dropped = gather(chosen, prompts, groups)
    with workspace.directory() as directory:
        rollouts.save(directory)
        summary = describe(rollouts, watch.seconds["generate"]) | {
            "rollout/dropped": num_dropped,
            "rollout/prompts_too_long": len(window) - len(places),
        }
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def fitting(prompts: list[list[int]], job: RolloutJob) -> list[int]:
    """Places of the prompts that leave room for a completion; the others are left out, never cut.

    Raises ValueError when none does.
    """
    room = job.generator.max_model_len - job.sampling.max_tokens
    found = [place for place, prompt in enumerate(prompts) if len(prompt) <= room]
    if not found:
        shortest = min(len(prompt) for prompt in prompts)
        raise ValueError(
            f"none of {len(prompts)} prompts fits: the shortest has {shortest} tokens, and generator.max_model_len "
            f"({job.generator.max_model_len}) less sampling.max_tokens ({job.sampling.max_tokens}) leaves {room}; "
            "raise generator.max_model_len"
        )
    return found


def gather(examples: list[Example], prompts: list[list[int]], groups: list[list[Completion]]) -> tuple[Rollouts, int]:
    """The rollout set of these completions, and how many were dropped for a token without a log-prob."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    offsets, prompt_lengths, group_ids, texts = [0], [], [], []
    num_dropped = 0
    for group, (example, prompt, completions) in enumerate(zip(examples, prompts, groups, strict=True)):
        for completion in completions:
            if any(math.isnan(value) for value in completion.logprobs):
                num_dropped += 1
                continue
            token_ids += [*prompt, *completion.token_ids]
            logprobs += [*[0.0] * len(prompt), *completion.logprobs]
            offsets.append(len(token_ids))
            prompt_lengths.append(len(prompt))
            group_ids.append(group)
            texts.append(RolloutTexts(example, completion.text, completion.finish_reason))
    rollouts = Rollouts(
        token_ids=torch.tensor(token_ids),
        generator_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        offsets=torch.tensor(offsets),
        prompt_lengths=torch.tensor(prompt_lengths),
        group_ids=torch.tensor(group_ids),
        texts=tuple(texts),
    )
    return rollouts, num_dropped
