"""The decision on what is pruned, over versions made by hand."""

from __future__ import annotations

import pytest

from forge_core.operation import RetentionConfig
from forge_core.retention_rules import Version, to_prune

KEEP_ONE = RetentionConfig(keep_last=1)
START, SFT = Version(0, "d0", "start"), Version(1, "d1", "sft")


def updates(first: int, last: int) -> list[Version]:
    return [Version(number, f"d{number}") for number in range(first, last + 1)]


def pruned_numbers(policies: list[Version], retention: RetentionConfig, states: list[Version] = [], **needs) -> str:  # noqa: B006
    """Numbers of the policies, then of the train states, that are pruned."""
    names = to_prune(policies, states, retention, **needs).prune
    numbers = {kind: [name[-2:] for name in names if name.startswith(kind)] for kind in ("policies", "train_states")}
    return f"{' '.join(numbers['policies'])} | {' '.join(numbers['train_states'])}".strip()


# Versions 0 (start), 1 (SFT) and 2 to 9 (updates), unless said otherwise.
@pytest.mark.parametrize(
    ("settings", "needs", "expected"),
    [
        ({}, {}, "|"),
        ({"keep_last": 1}, {}, "02 03 04 05 06 07 08 |"),
        ({"keep_last": 3}, {}, "02 03 04 05 06 |"),
        ({"keep_last": 20}, {}, "|"),
        ({"keep_last": 1, "keep_every": 4}, {}, "02 03 05 06 07 |"),
        (
            {"keep_last": 1, "best_metric": "eval/h/accuracy"},
            {"scores": {2: 0.1, 5: 0.9, 7: 0.8}},
            "02 03 04 06 07 08 |",
        ),
        # The newest of equals is best.
        ({"keep_last": 1, "best_metric": "eval/h/accuracy"}, {"scores": {5: 0.9, 7: 0.9}}, "02 03 04 05 06 08 |"),
        # The best is among the newest already: no older one is kept in its place.
        ({"keep_last": 1, "best_metric": "eval/h/accuracy"}, {"scores": {5: 0.8, 9: 0.9}}, "02 03 04 05 06 07 08 |"),
        ({"keep_last": 1}, {"needed": {"d4": "held", "d6": "published as x", "other": "held"}}, "02 03 05 07 08 |"),
        ({}, {"needed": {"d4": "held"}}, "|"),
    ],
)
def test_policies_that_are_pruned(settings: dict, needs: dict, expected: str):
    assert pruned_numbers([START, SFT, *updates(2, 9)], RetentionConfig(**settings), **needs) == expected


@pytest.mark.parametrize(
    ("states", "needs", "expected"),
    [
        (updates(0, -1), {}, "02 03 04 05 06 07 08 |"),
        # The two newest train states, and the policies they belong to.
        ([Version(number, f"s{number}") for number in (2, 4, 6, 8)], {}, "02 03 04 05 07 | 02 04"),
        # A damaged one does not count, and is not kept either.
        (
            [Version(2, "s2"), Version(4, "s4"), Version(6, "s6", is_readable=False), Version(8, "s8")],
            {},
            "02 03 05 06 07 | 02 06",
        ),
        # A train state that is held keeps its policy.
        ([Version(number, f"s{number}") for number in (2, 4, 6, 8)], {"needed": {"s2": "held"}}, "03 04 05 07 | 04"),
    ],
)
def test_train_states_that_are_pruned(states: list[Version], needs: dict, expected: str):
    assert pruned_numbers([START, SFT, *updates(2, 9)], KEEP_ONE, states, **needs) == expected


def test_with_keep_last_0_no_train_state_is_pruned():
    states = [Version(number, f"s{number}") for number in (2, 4, 6)]
    assert pruned_numbers([START, SFT, *updates(2, 9)], RetentionConfig(), states) == "|"


def test_without_sft_the_start_policy_is_where_the_optimizer_started():
    decision = to_prune([START, *updates(1, 3)], [], KEEP_ONE)
    assert decision.prune == ("policies/v0001", "policies/v0002")
    assert decision.kept == {
        "policies/v0000": "the optimizer started from it",
        "policies/v0003": "one of the newest 1",
    }


def test_a_run_of_updates_alone_keeps_its_newest():
    assert pruned_numbers(updates(5, 7), KEEP_ONE) == "05 06 |"


def test_settings_that_could_never_take_effect_are_refused():
    with pytest.raises(ValueError, match="keep_last is 0, which prunes nothing"):
        RetentionConfig(keep_every=5)
    with pytest.raises(ValueError, match="best_metric"):
        RetentionConfig(keep_last=1, best_metric="accuracy")
