"""A dataset is stored once for a run: what happens to its source later cannot shift the order of its examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_core.artifacts import ArtifactError, Manifest, fetch
from forge_core.config import DatasetConfig
from forge_core.examples import read_examples
from forge_core.plan import Plan
from forge_core.stages.__main__ import run_job
from forge_core.stages.workspace import Workspace
from tests.pipeline import tiny_config


def materialised(tmp_path: Path, source: Path, run_id: str) -> Manifest:
    """The dataset artifact of a run that reads this file."""
    settings = {"path": str(source)}
    job = Plan(tiny_config(str(tmp_path / "store")), run_id).dataset(DatasetConfig(fn="file", kwargs=settings))
    manifest = run_job(job, Workspace(tmp_path))
    assert manifest is not None
    return manifest


def write(source: Path, *questions: str) -> None:
    source.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions))


def test_a_file_that_changes_after_a_run_has_begun_changes_only_later_runs(tmp_path: Path):
    source = tmp_path / "problems.jsonl"
    write(source, "a", "b")
    begun = materialised(tmp_path, source, "begun")
    write(source, "z", "a", "b")
    assert materialised(tmp_path, source, "begun") == begun  # a resumed run goes on with what it began with
    _, files = fetch(begun.ref, tmp_path)
    assert [example.messages[0].content for example in read_examples(files / "examples.jsonl")] == ["a", "b"]
    later = materialised(tmp_path, source, "later")
    assert later.digest != begun.digest  # so every job that reads it is another one


def test_a_dataset_without_examples_is_refused(tmp_path: Path):
    source = tmp_path / "problems.jsonl"
    write(source)
    with pytest.raises(ValueError, match="yields no examples"):
        materialised(tmp_path, source, "run")


def test_a_mixture_is_counted_by_source(tmp_path: Path):
    sources = [{"fn": "arithmetic"}, {"fn": "reasoning_gym", "kwargs": {"task": "chain_sum", "size": 50}}]
    dataset = DatasetConfig(fn="mixture", kwargs={"sources": sources, "size": 20})
    manifest = run_job(Plan(tiny_config(str(tmp_path / "store")), "run").dataset(dataset), Workspace(tmp_path))
    assert manifest is not None
    counts = manifest.summary
    assert counts["dataset/examples"] == counts["dataset/from/arithmetic"] + counts["dataset/from/reasoning_gym"] == 20


def test_the_order_of_examples_is_that_of_their_content_whatever_code_yields_them(tmp_path: Path):
    job = Plan(tiny_config(str(tmp_path / "store")), "run").dataset(DatasetConfig(fn="arithmetic"))
    edited = job.model_copy(update={"source_sha256": "0" * 64, "output": f"{job.output}-edited"})
    before, after = (run_job(one, Workspace(tmp_path)) for one in (job, edited))
    assert before is not None
    assert after is not None
    assert before.digest != after.digest
    assert before.sha256_of("examples.jsonl") == after.sha256_of("examples.jsonl")
    with pytest.raises(ArtifactError, match=r"has no prompts\.jsonl; it has examples\.jsonl"):
        before.sha256_of("prompts.jsonl")
