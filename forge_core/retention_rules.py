"""Which policies and train states keep their files: a pure decision over what a run has.

Always kept are the policy its optimizer started from and the start policy, the newest train states with the policies
they belong to (a resume replays from there), the newest policy, and what somebody holds or has published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_core.operation import RetentionConfig

NUM_TRAIN_STATES = 2  # the newest one and, should that be damaged, the one before


@dataclass(frozen=True)
class Version:
    """A policy version or train state that has its files. What keeps it by its number alone needs no more than that."""

    number: int
    digest: str = ""
    stage: str = "update"
    is_readable: bool = True


@dataclass(frozen=True)
class Decision:
    """Names to prune, and why the others stay."""

    prune: tuple[str, ...]
    kept: dict[str, str]


def to_prune(
    policies: Sequence[Version],
    train_states: Sequence[Version],
    retention: RetentionConfig,
    *,
    needed: Mapping[str, str] | None = None,
    scores: Mapping[int, float] | None = None,
) -> Decision:
    """What loses its files. `needed` gives reasons by digest, `scores` the best_metric of versions that have one."""
    needed = needed or {}
    newest = sorted(state.number for state in train_states if state.is_readable)[-NUM_TRAIN_STATES:]
    kept_states = {state.number: needed[state.digest] for state in train_states if state.digest in needed}
    kept_states |= dict.fromkeys(newest, f"one of the newest {NUM_TRAIN_STATES} train states")
    if retention.keep_last == 0:
        kept_states = {state.number: "keep_last is 0" for state in train_states}
    # Later entries win: a reason that can pass, such as a hold, is named only when there is no other.
    kept_policies = {policy.number: needed[policy.digest] for policy in policies if policy.digest in needed}
    if scores:
        best = max(scores, key=lambda number: (scores[number], number))
        kept_policies[best] = f"best {retention.best_metric}: {scores[best]:g}"
    kept_policies |= {number: f"belongs to {_name('train_states', number)}" for number in kept_states}
    kept_policies |= kept_by_number([policy.number for policy in policies], retention)
    kept_policies |= {policy.number: "start policy" for policy in policies if policy.stage == "start"}
    if made_otherwise := [policy.number for policy in policies if policy.stage != "update"]:
        kept_policies[max(made_otherwise)] = "the optimizer started from it"
    prune, kept = [], {}
    for kind, versions, reasons in (
        ("policies", policies, kept_policies),
        ("train_states", train_states, kept_states),
    ):
        for version in versions:
            if version.number in reasons:
                kept[_name(kind, version.number)] = reasons[version.number]
            else:
                prune.append(_name(kind, version.number))
    return Decision(tuple(prune), kept)


def kept_by_number(numbers: Sequence[int], retention: RetentionConfig) -> dict[int, str]:
    """Policy versions that keep their files by their number alone, and why."""
    if retention.keep_last == 0:
        return dict.fromkeys(numbers, "keep_last is 0")
    every, kept = retention.keep_every, {}
    if every:
        kept |= {number: f"a multiple of {every}" for number in numbers if number % every == 0}
    newest = sorted(numbers)[-retention.keep_last :]
    return kept | dict.fromkeys(newest, f"one of the newest {retention.keep_last}")


def _name(kind: str, number: int) -> str:
    return f"{kind}/v{number:04d}"
