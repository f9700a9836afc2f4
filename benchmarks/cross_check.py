"""Our losses, advantages, KL estimates and corrections against those of verl and TRL, on random batches.

    python -m benchmarks.cross_check [--batches 200] [--seed 0]

Compares with whichever of the two can be imported; they are no dependency of this project. Exits with 1 when a quantity
differs by more than rounding and no reason is known, with 2 when neither is installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.other_systems import MAX_LENGTH, Batch, Value, trl, verl
from forge_core import advantages, kl, losses
from forge_core.advantages import AdvantageInputs, compute_advantages
from forge_core.batching import token_weights
from forge_core.corrections import bounded, importance_weights
from forge_core.losses import LossInputs
from forge_core.update_config import Aggregation, CorrectionConfig

TOLERANCE = 2e-6  # float32; values and gradients are of order 1

# Where we mean to differ.
REASONS = {
    ("reinforce_pp_baseline", "verl"): "equal rewards have 0 here, minus the mean there",
    ("gdpo", "verl"): "whitened over completions here, over tokens there",
}


def random_batches(count: int, seed: int) -> Iterator[Batch]:
    """Batches of 2 to 5 groups of 2 to 8 completions of 1 to 12 tokens, some groups with equal rewards."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    def integer(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for _ in range(count):
        sizes = integer(2, 9, int(integer(2, 6, 1)))
        groups = torch.arange(len(sizes)).repeat_interleave(sizes)
        size = len(groups)
        old = -2 * uniform(size, MAX_LENGTH) - 0.1
        rewards = torch.stack([integer(0, 2, size).float(), integer(0, 5, size) / 4], dim=1)
        rewards[groups == 0] = rewards[0].clone()
        yield Batch(
            old=old,
            new=old + 1.2 * (uniform(size, MAX_LENGTH) - 0.5),
            reference=old + 0.8 * (uniform(size, MAX_LENGTH) - 0.5),
            generator=old + 2 * (uniform(size, MAX_LENGTH) - 0.5),
            advantages=2 * uniform(size) - 1,
            mask=torch.arange(MAX_LENGTH) < integer(1, MAX_LENGTH + 1, size)[:, None],
            rewards=rewards,
            groups=groups,
        )


def our_loss(name: str, aggregation: Aggregation, **kwargs: float) -> Value:
    """A loss of ours with its aggregation, as one number."""

    def value(batch: Batch, new: Tensor) -> Tensor:
        ids = torch.arange(len(new))[:, None].expand(new.shape)
        inputs = LossInputs(new, batch.generator, batch.old, batch.spread_advantages, batch.mask, ids)
        weights = token_weights(batch.mask, ids, aggregation, max_tokens=MAX_LENGTH)
        return (getattr(losses, name)(inputs, **kwargs).per_token * weights)[batch.mask].sum()

    return value


def our_kl(name: str) -> Value:
    return lambda batch, new: getattr(kl, name)(new, batch.reference)[batch.mask].mean()


def our_advantage(name: str) -> Value:
    def value(batch: Batch, new: Tensor) -> Tensor:
        lengths = batch.mask.sum(dim=1)
        inputs = AdvantageInputs(batch.rewards, torch.ones(2), batch.total, batch.groups, lengths)
        found, _ = compute_advantages(inputs, getattr(advantages, name), torch.ones(len(new), dtype=torch.bool))
        return found

    return value


def our_correction(method: str, level: str, low: float, high: float) -> Value:
    config = CorrectionConfig.model_validate({"method": method, "level": level, "low": low, "high": high})

    def value(batch: Batch, new: Tensor) -> Tensor:
        ids = torch.arange(len(new))[:, None].expand(new.shape)
        log_ratio = torch.where(batch.mask, batch.old - batch.generator, 0.0)
        return torch.where(batch.mask, bounded(importance_weights(log_ratio, batch.mask, ids, level), config), 0.0)

    return value


OURS: dict[str, Value] = {
    "grpo": our_loss("grpo", "sequence_mean", clip_low=0.2, clip_high=0.2),
    "dapo": our_loss("dapo", "token_mean", clip_low=0.2, clip_high=0.28, dual_clip=1.3),
    "clip-higher, no dual clip": our_loss("grpo", "token_mean", clip_low=0.2, clip_high=0.28),
    "dr_grpo": our_loss("grpo", "fixed_horizon", clip_low=0.2, clip_high=0.2),
    "cispo": our_loss("cispo", "token_mean", clip_low=1.0, clip_high=0.3),
    "gspo": our_loss("gspo", "sequence_mean", clip_low=0.03, clip_high=0.04),
    "sapo": our_loss("sapo", "sequence_mean"),
    "k1": our_kl("k1"),
    "k2": our_kl("k2"),
    "k3": our_kl("k3"),
    "truncated weights, token": our_correction("truncate", "token", 0.0, 2.0),
    "truncated weights, sequence": our_correction("truncate", "sequence", 0.0, 2.0),
    "masked weights, token": our_correction("mask", "token", 0.5, 2.0),
} | {
    name: our_advantage(name)
    for name in ("group_zscore", "group_mean", "leave_one_out", "reinforce_pp", "reinforce_pp_baseline", "gdpo")
}


def compare(ours: Value, theirs: Value, batches: list[Batch]) -> tuple[float, float]:
    """Largest difference of value and of gradient in the new log-probs."""
    largest = [0.0, 0.0]
    for batch in batches:
        found = []
        for value in (ours, theirs):
            new = batch.new.clone().requires_grad_()
            result = value(batch, new)
            gradient = torch.zeros_like(new)
            if result.requires_grad:
                (gradient,) = torch.autograd.grad(result, new)
            found.append((result.detach(), gradient))
        for place, (one, other) in enumerate(zip(*found, strict=True)):
            largest[place] = max(largest[place], float((one - other).abs().max()))
    return largest[0], largest[1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cross_check", description="Compare with verl and TRL.")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    batches = list(random_batches(arguments.batches, arguments.seed))
    systems: dict[str, dict[str, Value]] = {}
    for name, load in (("verl", verl), ("trl", trl)):
        try:
            systems[name] = load()
        except ImportError as error:
            print(f"{name} cannot be imported and is left out: {error}")
    if not systems:
        print("install verl or trl in an environment that also holds this project, and run again")
        sys.exit(2)
    is_unexplained = False
    print(f"{'quantity':<28}{'system':<13}{'batches':>8}{'value':>10}{'gradient':>10}  verdict")
    for system, quantities in systems.items():
        for name, theirs in quantities.items():
            value, gradient = compare(OURS[name], theirs, batches)
            is_equal = max(value, gradient) <= TOLERANCE
            reason = REASONS.get((name, system))
            verdict = "equal" if is_equal else "differs" if reason is None else f"differs: {reason}"
            is_unexplained |= not is_equal and reason is None
            label = f"{system} {importlib.metadata.version(system)}"
            print(f"{name:<28}{label:<13}{len(batches):>8}{value:>10.1e}{gradient:>10.1e}  {verdict}")
    sys.exit(int(is_unexplained))


if __name__ == "__main__":
    main()
