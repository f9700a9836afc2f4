"""Stage `reward_model`: a policy and preference pairs -> a sequence classifier whose logit says which is preferred.

The loss of a pair is that of Bradley and Terry, -log sigmoid(chosen - rejected). Only differences matter to it, so a
small term keeps the logits themselves near 0 (arXiv:2312.09244, section 4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.artifacts import Manifest
from forge_core.chat import encode_whole, load_tokenizer
from forge_core.examples import preference, read_examples
from forge_core.jobs import RewardModelJob
from forge_core.stages.fit import Fit, history, summarise
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.scalar_trainer import ScalarTrainer

logger = logging.getLogger(__name__)

Pair = tuple[list[int], list[int]]  # ids of the whole conversations: chosen, rejected


def run(job: RewardModelJob, workspace: Workspace) -> Manifest:
    """Train for at most `num_steps` optimizer steps."""
    watch, settings = Stopwatch(), job.reward_model
    with watch("load"):
        _, policy_dir = workspace.fetch(job.policy)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        pairs = read_pairs(dataset_dir / "examples.jsonl", policy_dir, job)
        heldout: list[Pair] = []
        if job.validation is not None and settings.validation is not None:
            _, heldout_dir = workspace.fetch(job.validation)
            heldout = read_pairs(heldout_dir / "examples.jsonl", policy_dir, job)[: settings.validation.num_examples]
        trainer = ScalarTrainer(policy_dir, settings.optimizer, settings.total_steps(len(pairs)), seed=job.seed)
        course = Preferences(trainer, job, pairs, dataset.sha256_of("examples.jsonl"), heldout)
    num_too_long = sum(not course.is_short(pair) for pair in pairs)
    if num_too_long == len(pairs):
        raise ValueError(
            f"none of {len(pairs)} pairs fits into trainer.row_tokens ({job.trainer.row_tokens}); raise it"
        )
    if num_too_long:
        logger.warning("%d of %d pairs have an answer longer than a row and are left out", num_too_long, len(pairs))
    with watch("reward_model"):
        progress = Fit(trainer, job, course, workspace).run()
    tail = progress.steps[-10:]
    summary = summarise(progress, "reward_model") | {"reward_model/pairs_too_long": num_too_long}
    for name in ("accuracy", "margin"):
        summary[f"reward_model/{name}"] = sum(step[f"reward_model/{name}"] for step in tail) / max(1, len(tail))
    with workspace.directory() as directory:
        trainer.model.save_pretrained(directory)
        load_tokenizer(policy_dir).save_pretrained(directory)
        (directory / "history.jsonl").write_text(history(progress))
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


@dataclass
class Preferences:
    """What a reward model learns."""

    trainer: ScalarTrainer
    job: RewardModelJob
    pairs: Sequence[Pair]
    content: str
    heldout: Sequence[Pair]

    @property
    def num_items(self) -> int:
        """Pairs, those that are left out included."""
        return len(self.pairs)

    def is_short(self, pair: Pair) -> bool:
        """Whether both conversations fit into a row; neither is ever cut."""
        return max(map(len, pair)) <= self.job.trainer.row_tokens

    def step(self, indices: list[int]) -> dict[str, float]:
        """One optimizer step on these pairs."""
        pairs = [self.pairs[index] for index in indices if self.is_short(self.pairs[index])]
        scores: list[Tensor] = []

        def loss_of(chunk: Sequence[Pair]) -> Callable[[], Tensor]:
            def loss() -> Tensor:
                found = self._scores(chunk)
                scores.append(found.detach())
                return self._losses(found).sum() / len(pairs)

            return loss

        metrics = self.trainer.train_step([loss_of(chunk) for chunk in self._chunks(pairs)])
        measured = describe(torch.cat(scores)) if scores else {"accuracy": 0.0, "margin": 0.0}
        # A float, as which a snapshot gives it back.
        num_tokens = float(sum(len(ids) for pair in pairs for ids in pair))
        named = {f"reward_model/{name}": value for name, value in measured.items()}
        return metrics | named | {"tokens/total": num_tokens}

    @torch.no_grad()
    def validate(self) -> tuple[float, dict[str, float]]:
        """Mean loss of the held-out pairs, and how often the preferred answer is ahead."""
        pairs = [pair for pair in self.heldout if self.is_short(pair)]
        if not pairs:
            raise ValueError("no pair of the validation dataset fits into trainer.row_tokens; raise it")
        scores = torch.cat([self._scores(chunk) for chunk in self._chunks(pairs)])
        return self._losses(scores).mean().item(), describe(scores)

    def _chunks(self, pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
        size = max(1, self.job.reward_model.micro_batch_pairs >> self.job.memory_halvings)
        return [pairs[start : start + size] for start in range(0, len(pairs), size)]

    def _scores(self, pairs: Sequence[Pair]) -> Tensor:
        """Logits [n, 2] of chosen and rejected."""
        return self.trainer.scores([ids for pair in pairs for ids in pair]).unflatten(0, (-1, 2))

    def _losses(self, scores: Tensor) -> Tensor:
        """Loss [n] of each pair."""
        centred = self.job.reward_model.center_coefficient * scores.sum(dim=1).square()
        return centred - F.logsigmoid(scores[:, 0] - scores[:, 1])


def describe(scores: Tensor) -> dict[str, float]:
    """Of logits [n, 2]: how often the preferred answer is ahead, and by how much."""
    margins = scores[:, 0] - scores[:, 1]
    return {"accuracy": (margins > 0).float().mean().item(), "margin": margins.mean().item()}


def read_pairs(examples_path: Path, policy_dir: Path, job: RewardModelJob) -> list[Pair]:
    """Preference pairs as token ids; raises ValueError for an example that is none."""
    tokenizer = load_tokenizer(policy_dir)
    pairs = []
    for example in read_examples(examples_path):
        chosen, worse = (encode_whole(tokenizer, turns, job.chat) for turns in preference(example))
        pairs.append((chosen, worse))
    return pairs
