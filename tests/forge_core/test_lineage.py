"""What made an artifact, and what became of one: nothing is left out, and broken links are shown as broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core import publication, storage
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.config import PolicyConfig
from forge_core.lineage import Lineage, as_tree, downstream, find, influence_of_example, upstream
from forge_core.lineage_text import flatten, ranges
from forge_core.plan import Plan
from tests.pipeline import tiny_config
from tests.stored_runs import commit, store_run


def manifest(plan: Plan, name: str) -> Manifest:
    found = read_manifest(f"{plan.run_uri}/{name}")
    assert found is not None
    return found


def names(lineage: Lineage, plan: Plan) -> list[str]:
    return [node.uri.removeprefix(f"{plan.run_uri}/") for node in lineage.nodes.values()]


def delete(uri: str) -> None:
    fs, path = storage.filesystem(f"{uri}/manifest.json")
    fs.rm_file(path)


def test_the_chain_of_a_policy_goes_down_to_datasets_sources_and_settings(root: str):
    plan = store_run(tiny_config(root), "run")
    lineage = upstream(find(plan.run_uri))
    dataset = manifest(plan, "policies/v0001").inputs["dataset"]
    expected = [f"policies/v{version:04d}" for version in range(5)]
    expected += [f"{kind}/v{version:04d}" for kind in ("rollouts", "scored") for version in (1, 2, 3)]
    assert sorted(names(lineage, plan)) == sorted([*expected, dataset.uri.removeprefix(f"{plan.run_uri}/")])
    assert lineage.artifact == manifest(plan, "policies/v0004").ref
    update = lineage.nodes[lineage.artifact.digest]
    assert update.stage == "update"
    assert update.settings["minibatches"] == 2
    assert update.software == manifest(plan, "policies/v0004").software
    assert update.seed == 0
    assert update.source_sha256 == {"grpo": manifest(plan, "policies/v0004").job["source_sha256"]}
    assert list(lineage.nodes[dataset.digest].source_sha256) == ["arithmetic"]
    scored = lineage.nodes[manifest(plan, "scored/v0003").digest]
    assert scored.source_sha256 == manifest(plan, "scored/v0003").job["source_sha256"]
    assert set(scored.source_sha256) == {"exact_number", "group_zscore"}


def test_a_published_name_stands_for_its_policy_and_a_run_for_its_newest(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    second = manifest(plan, "policies/v0002").ref
    publication.publish(str(tmp_path), "best", second, run_id="run", metrics={})
    assert find(f"{tmp_path}/published/best") == second
    assert find(f"{tmp_path}/run") == manifest(plan, "policies/v0004").ref
    assert find(f"{tmp_path}/run/scored/v0001") == manifest(plan, "scored/v0001").ref
    with pytest.raises(ArtifactError, match="no artifact, no published name and no run"):
        find(f"{tmp_path}/nothing")


def test_a_tree_expands_each_artifact_once_within_its_width(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    lineage = upstream(find(plan.run_uri))
    lines = as_tree(lineage).splitlines()
    assert max(len(line) for line in lines[1:]) <= 100
    for digest in lineage.nodes:
        assert sum(f"  {digest[:12]}  " in line for line in lines) == 1
    spine = [line.split()[0] for line in lines if line.startswith("policies/")]
    assert spine == ["policies/v0004", "policies/v0003", "policies/v0002", "policies/v0001", "policies/v0000"]
    dataset = manifest(plan, "policies/v0001").inputs["dataset"].uri.removeprefix(f"{plan.run_uri}/")
    assert sum(f"{dataset} (above)" in line for line in lines) == 3  # two more rollout sets, and SFT
    assert sum("optimizer.learning_rate=0.001" in line for line in lines) == 1  # the same in every update
    assert sum("sft.num_steps=20" in line for line in lines) == 1


def test_settings_that_change_on_the_way_are_shown_where_they_do(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    store_run(config, "first")
    policy = PolicyConfig(uri=f"{tmp_path}/first/policies/v0003", fresh=config.policy.fresh)
    branch = config.model_copy(update={"policy": policy, "grpo": config.grpo.model_copy(update={"minibatches": 1})})
    plan = store_run(branch, "branch")
    text = as_tree(upstream(find(plan.run_uri)))
    spine = [line.split()[0] for line in text.splitlines() if re.match(r"(first/)?policies/", line)]
    assert spine == [
        *(f"policies/v{version:04d}" for version in (4, 3, 2, 1, 0)),
        *(f"first/policies/v{version:04d}" for version in (3, 2, 1, 0)),
    ]
    assert "policies/v0000  " in text
    assert re.search(r"start of first/policies/v0003$", text, re.MULTILINE)
    assert re.search(r"^first/policies/v0003 .*\n.*settings minibatches=2$", text, re.MULTILINE)


@pytest.mark.slow
def test_a_fold_of_five_hundred_updates_is_walked_without_nesting():
    config = tiny_config("memory://fold-of-five-hundred")
    plan = store_run(config.model_copy(update={"grpo": config.grpo.model_copy(update={"num_iterations": 500})}), "run")
    lineage = upstream(find(plan.run_uri))
    assert len(lineage.nodes) == 502 + 500 + 500 + 1
    lines = as_tree(lineage).splitlines()
    assert len(lines) < 3 * 500 + 100
    assert max(len(line) - len(line.lstrip(" │├└─")) for line in lines) <= 15


@pytest.mark.parametrize("damage", ["missing", "damaged", "replaced"])
def test_a_broken_link_is_shown_and_not_passed_over(root: str, damage: str):
    plan = store_run(tiny_config(root), "run")
    victim = manifest(plan, "rollouts/v0002")
    delete(victim.uri)
    if damage == "damaged":
        storage.create_exclusive(f"{victim.uri}/manifest.json", b'{"kind": "rollouts"}')
    if damage == "replaced":
        other = victim.model_copy(update={"digest": "0" * 64})
        storage.create_exclusive(f"{victim.uri}/manifest.json", other.model_dump_json().encode())
    lineage = upstream(find(plan.run_uri))
    problem = lineage.nodes[victim.digest].problem
    assert problem is not None
    assert damage in problem
    assert f"was digest {victim.digest}" in problem
    text = as_tree(lineage)
    assert f"! rollouts/v0002 is {damage}" in text
    assert "rollouts/v0001" in text  # what lies beyond is found by the other ways
    assert "policies/v0000" in text


def test_what_was_made_from_a_rollout_set_is_found_in_every_run_under_the_root(root: str):
    config = tiny_config(root)
    first = store_run(config, "first")
    policy = PolicyConfig(uri=f"{root}/first/policies/v0003", fresh=config.policy.fresh)
    store_run(config.model_copy(update={"policy": policy}), "branch")
    store_run(config.model_copy(update={"seed": 1}), "unrelated")
    lineage = downstream(root, manifest(first, "rollouts/v0003").ref)
    assert sorted(names(lineage, first)) == ["policies/v0004", "rollouts/v0003", "scored/v0003"]
    assert lineage.problems == ()
    lineage = downstream(root, manifest(first, "rollouts/v0002").ref)
    found = sorted(uri.removeprefix(f"{root}/") for uri in names(lineage, first) if uri.startswith(root))
    assert len(found) == 5 + 3 + 3  # the branch's policies, rollouts and scores, all of them
    assert all(name.startswith("branch/") for name in found)


def test_a_copy_in_another_run_is_named_beside_the_original(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "first")
    store_run(tiny_config(str(tmp_path)), "second")
    lineage = downstream(str(tmp_path), manifest(plan, "scored/v0003").ref)
    node = lineage.nodes[manifest(plan, "policies/v0004").digest]
    assert [node.uri, *node.copies] == [f"{tmp_path.as_uri()}/{run}/policies/v0004" for run in ("first", "second")]


def test_what_may_depend_on_an_artifact_through_a_missing_one_is_said(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    origin = manifest(plan, "rollouts/v0003")
    lost = manifest(plan, "scored/v0003")
    delete(lost.uri)
    lineage = downstream(str(tmp_path), origin.ref)
    assert names(lineage, plan) == ["rollouts/v0003"]
    assert list(lineage.problems) == [
        "1 without a manifest, never committed or deleted: run/scored/v0003",
        f"run/scored/v0003 is missing, was digest {lost.digest}; made from it, and so perhaps from this one: "
        "run/policies/v0004",
    ]


def test_an_example_that_was_trained_on_is_told_from_one_that_was_only_sampled(root: str):
    # Two completions each of two examples per iteration, the first one's kept: 0+0 and 0+1, then 0+2 and 1+0, then 1+1
    # and 1+2. SFT took 2 steps of 32 from 9 examples, so each was in a batch 7 or 8 times.
    plan = store_run(tiny_config(root), "run")
    kept = influence_of_example(plan.run_uri, "0+2=")
    assert [(use.rollouts.uri, use.num_completions, use.num_kept) for use in kept.rollouts] == [
        (f"{plan.run_uri}/rollouts/v0002", 2, 2)
    ]
    assert kept.rollouts[0].updates == (manifest(plan, "policies/v0003").ref,)
    assert kept.rollouts[0].is_trained_on
    sampled = influence_of_example(plan.run_uri, "1+0=")
    assert [(use.num_completions, use.num_kept, use.is_trained_on) for use in sampled.rollouts] == [(2, 0, False)]
    assert [use.num_times in (7, 8) for use in sampled.sft] == [True]
    assert influence_of_example(root, "9+9=").influenced == ()


def test_an_example_influences_the_update_that_used_it_and_all_that_follow(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    plan = store_run(
        config, "run", rows=lambda job: ["new", "new", "x", "x"] if job.first_prompt == job.num_prompts else ["y"] * 4
    )
    found = influence_of_example(str(tmp_path), "new")  # in no dataset, so SFT has not seen it
    assert found.sft == ()
    assert [ref.uri for ref in found.influenced] == [f"{plan.run_uri}/policies/v{version:04d}" for version in (3, 4)]
    assert influence_of_example(str(tmp_path), "x").influenced == ()


def test_scores_that_cannot_be_read_count_as_perhaps_trained_on(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    path = storage.local_path(f"{manifest(plan, 'scored/v0002').files_uri}/scores.safetensors")
    assert path is not None
    path.write_bytes(b"other")
    found = influence_of_example(str(tmp_path), "1+0=")
    assert [(use.num_kept, use.is_trained_on) for use in found.rollouts] == [(None, True)]
    assert any("does not have the SHA-256" in problem for problem in found.problems)


def test_rollouts_scored_twice_and_never_used_are_told_apart(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    plan = store_run(config, "run", rows=lambda _job: ["new"] * 4)
    rewards = tuple(reward.model_copy(update={"weight": 0.5}) for reward in config.grpo.rewards)
    other = Plan(config.model_copy(update={"grpo": config.grpo.model_copy(update={"rewards": rewards})}), "rescored")
    again = other.score(manifest(plan, "rollouts/v0001").ref, 0)
    source = storage.local_path(manifest(plan, "scored/v0001").files_uri)
    assert source is not None
    rescored = commit(again, source)
    uses = [use for use in influence_of_example(str(tmp_path), "new").rollouts if use.scored == rescored.ref]
    assert [(use.num_kept, use.updates, use.is_trained_on) for use in uses] == [(2, (), False)]


def test_nested_settings_become_dotted_names():
    assert flatten({"a": {"b": 1, "c": [True, None]}, "d": {}}) == {"a.b": "1", "a.c.0": "True", "a.c.1": "", "d": "{}"}


def test_versions_that_follow_each_other_are_one_line():
    found = ranges(["r/policies/v0003", "r/policies/v0001", "r/policies/v0002", "r/policies/v0005", "r/datasets/x-1a"])
    assert found == ["r/datasets/x-1a", "r/policies/v0001 .. v0003 (3)", "r/policies/v0005"]


def test_the_command_line_prints_and_writes_the_same(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "forge_core.lineage", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    text = run(plan.run_uri, "--json", str(tmp_path / "lineage.json"))
    lineage = Lineage.model_validate_json((tmp_path / "lineage.json").read_text())
    assert text == as_tree(lineage)
    assert json.loads((tmp_path / "lineage.json").read_text())["artifact"] == lineage.artifact.model_dump()
    assert run(f"{plan.run_uri}/scored/v0002", "--influenced").splitlines()[1:] == [
        "  run/policies/v0003 .. v0004 (2)",
        "  run/rollouts/v0003",
        "  run/scored/v0003",
    ]
    assert "  policies/v0003 from rollouts/v0002: 2 of 2 completions" in run(plan.run_uri, "--example", "0+2=")
    done = subprocess.run([sys.executable, "-m", "forge_core.lineage", str(tmp_path / "x")], capture_output=True)
    assert done.returncode == 1
    assert b"is no artifact" in done.stderr
