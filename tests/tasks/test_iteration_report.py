"""The page of a run's iterations in the Prefect UI."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.plan import Plan
from tasks.iteration_report import MAX_CHARS, page, sparkline
from tests.pipeline import tiny_config

ROWS = [
    {"reward/mean": 0.25, "groups/informative": 5, "time/iteration_seconds": 2.0},
    {"reward/mean": 0.5, "groups/informative": 7, "entropy/mean": 1.25, "time/iteration_seconds": 1.0},
]


def sample(**changes) -> dict:
    plain = {"prompt": "1+1=", "completion": "2", "answer": "2", "advantage": 0.5, "rewards": {"exact_number": 1.0}}
    return plain | changes


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tiny_config(str(tmp_path)), "run")


def test_a_curve_runs_from_the_smallest_to_the_largest_value():
    assert sparkline([0, 0.5, 1]) == "▁▅█"
    assert sparkline([3, 3]) == "▁▁"
    assert sparkline([2.5]) == "▁"


def test_the_page_has_curves_samples_and_the_newest_iteration_first(plan: Plan):
    text = page(plan, ROWS, [sample()], [])
    assert "| reward | `▁█` | 0.500 |" in text
    assert "| entropy | `▁` | 1.250 |" in text  # an iteration without an update has none
    assert text.index("| 1 | 0.500 |") < text.index("| 0 | 0.250 |")
    assert "| 0 | 0.250 | 5 | - | 2.0 |" in text
    assert "| <code>1+1=</code> | <code>2</code> | <code>2</code> | exact_number 1 | +0.50 |" in text
    assert "KL" not in text  # a run without a reference policy
    assert "ALARM" not in text


def test_alarms_stand_at_the_top(plan: Plan):
    text = page(plan, ROWS, [], ["entropy/mean is 0, outside of [0.001, inf]"])
    assert text.index("**ALARM** entropy/mean is 0") < text.index("| reward |")


def test_whatever_a_model_says_stays_in_its_cell(plan: Plan):
    text = page(plan, ROWS, [sample(completion="a|b\n<script>x</script>", answer=None), sample(completion="")], [])
    assert "<code>a&#124;b⏎&lt;script&gt;x&lt;/script&gt;</code> | <code>-</code>" in text
    assert "| (empty) |" in text
    long = page(plan, ROWS, [sample(completion="y" * (MAX_CHARS + 7))], [])
    assert f"{'y' * MAX_CHARS} … 7 more</code>" in long
