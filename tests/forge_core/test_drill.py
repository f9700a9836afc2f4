"""The plan of a drill, what a fault may be, and the report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from forge_core.config import PostTrainConfig, load_config
from forge_core.drill import DrillConfig, Outcome, default_faults, disturbed, summarise
from forge_core.faults import Fault
from tests.pipeline import tiny_config

CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"


def test_the_default_plan_kills_each_stage_at_three_points_and_strikes_the_store_in_every_way(tmp_path: Path):
    faults = default_faults(tiny_config(str(tmp_path)))
    kills = Counter(fault.job.split()[0] for fault in faults if fault.action == "kill")
    assert kills == dict.fromkeys(("dataset", "start", "sft", "rollout", "score", "update", "evaluate"), 3)
    assert {fault.at for fault in faults if fault.action == "kill"} == {"work", "before_commit", "after_commit"}
    others = {fault.action for fault in faults} - {"kill"}
    assert others == {"kill_flow", "kill_all", "not_finite", "unavailable", "reset", "tear", "lose", "slow"}
    assert len(set(faults)) == len(faults)  # equal ones would share a marker and strike once


def test_kills_of_a_stage_with_several_jobs_fall_on_different_ones(tmp_path: Path):
    faults = default_faults(tiny_config(str(tmp_path)))
    assert [fault.job for fault in faults if fault.action == "kill" and fault.job.startswith("update")] == [
        "update v0002",
        "update v0003",
        "update v0004",
    ]


def test_the_soak_has_no_plan_but_keeps_the_record():
    config = load_config(CONFIGS / "soak.yaml", DrillConfig)
    plan = disturbed(config).fault_plan
    assert config.random_kills == 200
    assert plan is not None
    assert plan.faults == ()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"job": "sft", "action": "kill", "at": "upload"}, "faults.at is upload; kill happens at one of begin, work"),
        ({"job": "sft", "action": "reset", "at": "work"}, "reset happens at one of read, download, upload, create"),
        ({"job": "sft", "action": "tear", "at": "read"}, "only an upload can be torn or lost"),
        ({"job": "score", "action": "not_finite"}, "not_finite strikes the gradient of an update"),
        ({"job": "sft", "action": "explode"}, "action"),
    ],
)
def test_a_fault_that_could_not_happen_is_refused(fault: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Fault.model_validate(fault)


@pytest.mark.parametrize(
    ("job", "label", "expected"),
    [
        ("update v0002", "update v0002", True),
        ("update v0002", "update v0021", False),
        ("update", "update v0021", True),
        ("evaluate v0001", "evaluate v0001", True),
        ("roll", "rollout v0001", False),
    ],
)
def test_a_fault_strikes_the_job_or_the_stage_that_it_names(job: str, label: str, expected: bool):
    assert Fault(job=job, action="kill").strikes(label) is expected


def test_the_report_counts_extra_attempts_and_names_what_differs_or_never_struck():
    kill, late = Fault(job="sft", action="kill"), Fault(job="update v0099", action="kill")
    config = DrillConfig(run=PostTrainConfig(), faults=(kill, late))
    outcomes = [
        Outcome(struck=(kill,), stages=10, attempts=12, replays=1, restarts=1, different=()),
        Outcome(struck=(), stages=10, attempts=10, replays=0, restarts=0, different=("policies/v0003",)),
    ]
    report = summarise(config, outcomes, random_kills={"trainer": 2}, seconds_undisturbed=10.0, seconds_disturbed=50.0)
    assert report.faults == 3  # one planned, two at random
    assert (report.stages_total, report.stages_redone, report.restarts) == (20, 2, 1)
    assert report.seconds_lost_per_fault == (50 - 2 * 10) / 3
    assert report.not_struck == ("kill at work of update v0099",)
    assert not report.digests_equal
    assert "DIFFER" in report.markdown()
    assert "policies/v0003" in report.markdown()
