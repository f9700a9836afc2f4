"""Why two artifacts are not the same: the root cause is named, however far upstream it lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.config import FunctionConfig, PostTrainConfig
from forge_core.differences import explain, field_differences, job_differences
from forge_core.plan import Plan
from tests.pipeline import tiny_config
from tests.stored_runs import store_run


def manifest(plan: Plan, name: str) -> Manifest:
    found = read_manifest(f"{plan.run_uri}/{name}")
    assert found is not None
    return found


def changed(config: PostTrainConfig, part: str, **changes) -> PostTrainConfig:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=changes)})


def test_fields_are_named_by_path_and_values_that_only_say_where_are_left_out():
    ref = {"kind": "policy", "uri": "a", "digest": "1" * 64}
    there = {"output": "a", "policy": ref, "rewards": [{"fn": "x", "weight": 1.0}], "start": {"uri": "hf://a"}}
    here = {"output": "b", "policy": ref | {"uri": "b"}, "rewards": [{"fn": "x", "weight": 0.5}], "start": {"uri": 1}}
    assert [str(difference) for difference in field_differences(there, here)] == [
        "rewards.0.weight (1.0 there, 0.5 here)",
        "start.uri ('hf://a' there, 1 here)",
    ]
    here |= {"policy": ref | {"digest": "2" * 64}, "rewards": [], "injected": {}, "source": None}
    assert [str(difference) for difference in field_differences(there, here)] == [
        "policy (digest 111111111111 there, digest 222222222222 here)",
        "rewards ([{'fn': 'x', 'weight': 1.0}] there, [] here)",
        "source (absent there, None here)",
        "start.uri ('hf://a' there, 1 here)",
    ]


def test_a_job_differs_from_an_artifact_in_settings_inputs_and_software(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    made = manifest(plan, "policies/v0001")
    again = Plan(changed(plan.config, "sft", batch_size=16), "other").sft(made.inputs["policy"], made.inputs["dataset"])
    software = {**made.software, "torch": "9.9"}
    assert job_differences(made, again.as_json(), software) == [
        "sft.batch_size (32 there, 16 here)",
        f"software.torch ({made.software['torch']} there, 9.9 here)",
    ]
    assert job_differences(made, made.job, made.software) == []


def test_a_commit_over_another_job_names_the_field_even_when_it_is_a_uri(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    other = changed(plan.config, "policy", uri="hf://org/model")
    job = Plan(other, "run").start()
    with pytest.raises(
        ArtifactError, match=r"differing: policy\.uri \('fresh://qwen3' there, 'hf://org/model' here\)\. "
    ):
        artifacts.require_same_job(manifest(plan, "policies/v0000"), job.as_json(), job.digest())


def test_a_commit_by_other_software_says_so(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    made = manifest(plan, "policies/v0000")
    with pytest.raises(ArtifactError, match="differing: the versions of the software"):
        artifacts.require_same_job(made, made.job, "another digest")


def test_the_same_run_elsewhere_is_the_same(tmp_path: Path):
    first, second = (store_run(tiny_config(str(tmp_path / name)), name) for name in ("a", "b"))
    assert explain(manifest(first, "policies/v0004"), manifest(second, "policies/v0004")) == []


def test_a_setting_is_found_through_the_inputs_that_differ_because_of_it(root: str):
    config = tiny_config(root)
    first, second = store_run(config, "a"), store_run(changed(config, "sft", num_steps=30), "b")
    assert explain(manifest(first, "policies/v0002"), manifest(second, "policies/v0002")) == [
        "policies/v0002 differs because policies/v0001 differs because sft.num_steps is 20 there, 30 here"
    ]


def test_a_cause_in_many_places_is_told_once_where_it_is_nearest_to_the_origin(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    loss = FunctionConfig(fn="grpo", kwargs={"clip_low": 0.1})
    first, second = store_run(config, "a"), store_run(changed(config, "grpo", loss=loss), "b")
    assert explain(manifest(first, "policies/v0004"), manifest(second, "policies/v0004")) == [
        "policies/v0004 differs because policies/v0003 differs because policies/v0002 differs because "
        "loss.kwargs.clip_low is absent there, 0.1 here (and so do 2 more)"
    ]


def test_every_root_cause_is_named(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    first = store_run(config, "a")
    second = store_run(changed(changed(config, "sft", num_steps=30), "grpo", minibatches=1), "b")
    assert explain(manifest(first, "policies/v0002"), manifest(second, "policies/v0002")) == [
        "policies/v0002 differs because minibatches is 2 there, 1 here",
        "policies/v0002 differs because policies/v0001 differs because sft.num_steps is 20 there, 30 here",
    ]


def test_equal_jobs_with_other_files_are_a_sign_of_non_determinism(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    first, second = store_run(config, "a"), store_run(config, "b", spoiled=("rollouts/v0002",))
    assert explain(manifest(first, "scored/v0002"), manifest(second, "scored/v0002")) == [
        "scored/v0002 differs because rollouts/v0002 differs: same job, other bytes in content "
        "(non-determinism, or other hardware)"
    ]


def test_an_input_that_is_gone_is_named_and_not_passed_over(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    first, second = store_run(config, "a"), store_run(changed(config, "sft", num_steps=30), "b")
    gone = manifest(second, "policies/v0001")
    path = storage.local_path(f"{gone.uri}/manifest.json")
    assert path is not None
    path.unlink()
    assert explain(manifest(first, "policies/v0002"), manifest(second, "policies/v0002")) == [
        "policies/v0002 differs because scored/v0001 differs because rollouts/v0001 differs because its policy "
        f"policies/v0001 (here) is missing, was digest {gone.digest} (and so do 1 more)"
    ]


def test_policies_of_other_stages_are_not_compared_field_by_field(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    assert explain(manifest(plan, "policies/v0000"), manifest(plan, "policies/v0001")) == [
        "policies/v0000 (policies/v0001 here) differs because stage start made it there, sft here"
    ]


def test_the_command_line_compares_two_runs(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    config = changed(config, "grpo", num_iterations=5)
    first, second = store_run(config, "a"), store_run(changed(config, "sft", num_steps=30), "b")
    command = [sys.executable, "-m", "forge_core.differences", first.run_uri, second.run_uri]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"there  {first.run_uri}/policies/v0006",
        f"here   {second.run_uri}/policies/v0006",
        "policies/v0006 differs because policies/v0005 differs because ... 2 more ... differs because "
        "policies/v0002 differs because policies/v0001 differs because sft.num_steps is 20 there, 30 here",
    ]
