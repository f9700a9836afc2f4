"""Stage `dpo`: direct preference optimisation of a policy, with the policy it starts from as the reference.

The loss of a pair is -log sigmoid(beta * margin), where the margin is by how many nats more the chosen answer has
gained on the reference than the rejected one. Its gradient is that of -A * log-prob with A = beta * sigmoid(-beta *
margin) on the chosen answer and -A on the rejected one, so a step is two passes: one for the margins, one with these
advantages. The two answers of a pair may then lie in any row, micro-batch or rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.artifacts import Manifest
from forge_core.batching import TrainBatch, TrainSequence, pack_sequences
from forge_core.examples import preference, read_examples
from forge_core.jobs import DpoJob
from forge_core.losses import LossInputs, LossOutput
from forge_core.stages import learner
from forge_core.stages.fit import Fit, history, summarise
from forge_core.stages.sft import encoder, fits
from forge_core.stages.workspace import Stopwatch, Workspace
from forge_core.trainer.policy_trainer import PolicyTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, and their log-probs under the reference policy."""

    chosen: TrainSequence
    rejected: TrainSequence
    reference_margin: float = 0.0  # log-prob of the chosen answer less that of the rejected one, nats


def run(job: DpoJob, workspace: Workspace) -> Manifest | None:
    """Train for at most `num_steps` optimizer steps; returns the manifest on rank 0."""
    watch = Stopwatch()
    with watch("load"):
        _, policy_dir = workspace.fetch(job.policy)
        dataset, dataset_dir = workspace.fetch(job.dataset)
        pairs = read_pairs(dataset_dir / "examples.jsonl", policy_dir, job)
        heldout: list[Pair] = []
        if job.validation is not None and job.dpo.validation is not None:
            _, heldout_dir = workspace.fetch(job.validation)
            heldout = read_pairs(heldout_dir / "examples.jsonl", policy_dir, job)[: job.dpo.validation.num_examples]
        total_steps = job.dpo.total_steps(len(pairs))
        trainer = learner.trainer_from_policy(job, job.policy, job.dpo.optimizer, total_steps, workspace)
    with watch("reference"):
        content = dataset.sha256_of("examples.jsonl")
        course = Pairs(
            trainer, job, with_reference(pairs, trainer, job), content, with_reference(heldout, trainer, job)
        )
    with watch("dpo"):
        progress = Fit(trainer, job, course, workspace).run()
    num_too_long = sum(not is_short(pair, job) for pair in pairs)
    if num_too_long:
        logger.warning("%d of %d pairs have an answer longer than a row and are left out", num_too_long, len(pairs))
    tail = progress.steps[-10:]
    summary = summarise(progress, "dpo") | {
        "dpo/pairs_too_long": num_too_long,
        "tokens_per_second/dpo": sum(step["tokens/total"] for step in progress.steps) / watch.seconds["dpo"],
    }
    for name in ("accuracy", "margin", "chosen_logprob", "rejected_logprob"):
        summary[f"dpo/{name}"] = sum(step[f"dpo/{name}"] for step in tail) / max(1, len(tail))
    beside = {"history.jsonl": history(progress)}
    return learner.publish_policy(job, job.policy, trainer, workspace, summary=summary, watch=watch, beside=beside)


@dataclass
class Pairs:
    """What DPO learns."""

    trainer: PolicyTrainer
    job: DpoJob
    pairs: Sequence[Pair]
    content: str
    heldout: Sequence[Pair]

    @property
    def num_items(self) -> int:
        """Pairs, those that are left out included: a place in the stream does not depend on a row's length."""
        return len(self.pairs)

    def step(self, indices: list[int]) -> dict[str, float]:
        """One optimizer step on these pairs."""
        pairs = [self.pairs[index] for index in indices if is_short(self.pairs[index], self.job)]
        batch = pack(pairs, self.job)
        loss, slopes, metrics = compare(answer_logprobs(self.trainer, batch), pairs, self.job)
        metrics = self.trainer.train_step(with_slopes(batch, slopes), weighted_likelihood) | metrics
        return metrics | {"loss/policy": loss}

    def validate(self) -> tuple[float, dict[str, float]]:
        """Mean loss of the held-out pairs, and how often the chosen answer is ahead."""
        pairs = [pair for pair in self.heldout if is_short(pair, self.job)]
        loss, _, metrics = compare(answer_logprobs(self.trainer, pack(pairs, self.job)), pairs, self.job)
        return loss, {name.removeprefix("dpo/"): value for name, value in metrics.items()}


def weighted_likelihood(inputs: LossInputs) -> LossOutput:
    """-A lp: the advantages are gradients already, no importance weight belongs to them."""
    return LossOutput(-inputs.advantages * inputs.logprobs)


def compare(logprobs: Tensor, pairs: Sequence[Pair], job: DpoJob) -> tuple[float, Tensor, dict[str, float]]:
    """Mean loss, its slope [2 n] in each answer's log-prob (times -n), and what is reported of n pairs.

    `logprobs` [2 n] are those of the whole answers under the policy: chosen, rejected, chosen, ...
    """
    beta, smoothing = job.dpo.beta, job.dpo.label_smoothing
    reference = torch.tensor([pair.reference_margin for pair in pairs], dtype=torch.float64)
    chosen, rejected = logprobs.double().unflatten(0, (-1, 2)).unbind(1)
    margins = beta * (chosen - rejected - reference)  # [n]
    losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    slopes = beta * ((1 - smoothing) * torch.sigmoid(-margins) - smoothing * torch.sigmoid(margins))
    metrics = {
        "dpo/accuracy": (margins > 0).double().mean().item(),
        "dpo/margin": margins.mean().item(),
        "dpo/chosen_logprob": chosen.mean().item(),
        "dpo/rejected_logprob": rejected.mean().item(),
    }
    return losses.mean().item(), torch.stack([slopes, -slopes], dim=1).flatten().float(), metrics


def with_slopes(batch: TrainBatch, slopes: Tensor) -> TrainBatch:
    """The batch with every answer's slope as the advantage of its tokens, and the mean over pairs as their weight."""
    advantages = torch.where(batch.mask, slopes[batch.sequence_ids.clamp(min=0)], 0.0)
    return replace(batch, advantages=advantages, weights=batch.mask.float() / (len(slopes) // 2))


def answer_logprobs(trainer: PolicyTrainer, batch: TrainBatch) -> Tensor:
    """Log-prob [S] of each packed answer: the sum over its tokens."""
    num_answers = int(batch.sequence_ids.max()) + 1
    per_token = trainer.logprobs(batch)
    sums = torch.zeros(num_answers, dtype=torch.float64)
    return sums.index_add_(0, batch.sequence_ids[batch.mask], per_token[batch.mask].double())


def pack(pairs: Sequence[Pair], job: DpoJob) -> TrainBatch:
    """The answers of these pairs, chosen and rejected by turns."""
    members = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    return pack_sequences(members, learner.row_tokens(job, members))


def with_reference(pairs: Sequence[Pair], trainer: PolicyTrainer, job: DpoJob) -> list[Pair]:
    """The pairs with their margins under the trainer's policy, `batch_size` at a time."""
    found = list(pairs)
    short = [index for index, pair in enumerate(found) if is_short(pair, job)]
    for start in range(0, len(short), job.dpo.batch_size):
        chunk = short[start : start + job.dpo.batch_size]
        logprobs = answer_logprobs(trainer, pack([found[index] for index in chunk], job))
        margins = (logprobs[0::2] - logprobs[1::2]).tolist()
        for index, margin in zip(chunk, margins, strict=True):
            found[index] = replace(found[index], reference_margin=margin)
    return found


def is_short(pair: Pair, job: DpoJob) -> bool:
    """Whether both answers fit into a row; neither is ever cut."""
    return fits(pair.chosen, job) and fits(pair.rejected, job)


def read_pairs(examples_path: Path, policy_dir: Path, job: DpoJob) -> list[Pair]:
    """Preference pairs as token ids; raises ValueError for an example that is none."""
    turns_of = encoder(policy_dir, job.chat)
    pairs = []
    for example in read_examples(examples_path):
        # Of several sequences, the last is the one that teaches the last turn.
        chosen, worse = (only_last_turn(turns_of(turns)[-1]) for turns in preference(example))
        pairs.append(Pair(chosen, worse))
    return pairs


def only_last_turn(sequence: TrainSequence) -> TrainSequence:
    """The sequence with the mask on its last run of trained tokens alone."""
    mask = sequence.loss_mask
    last = int(mask.nonzero().max())
    before = (~mask[: last + 1]).nonzero()
    start = int(before.max()) + 1 if len(before) else 0
    only = torch.zeros_like(mask)
    only[start : last + 1] = True
    return replace(sequence, loss_mask=only)
