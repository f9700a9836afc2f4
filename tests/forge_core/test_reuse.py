"""What another run made by the same job is taken over, and a person can see why it was or was not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import Manifest
from forge_core.config import DatasetConfig
from forge_core.jobs import DatasetJob
from forge_core.plan import Plan
from forge_core.reuse import reuse
from forge_core.runs import write_run
from tests.pipeline import tiny_config

LOG = logging.getLogger("reuse")


def commit(job: DatasetJob, run_uri: str, directory: Path) -> Manifest:
    """The output of a dataset job, committed in a run that says that it is one."""
    write_run(run_uri, run_uri.rpartition("/")[2], tiny_config(run_uri))
    directory.mkdir(exist_ok=True)
    (directory / "examples.jsonl").write_text("{}\n" * 3)
    return artifacts.commit(
        directory,
        job.output,
        kind="dataset",
        job=job.as_json(),
        job_digest=job.digest(),
        inputs={},
        summary={"dataset/examples": 3},
        software=job.software,
        timings={"dataset": 1.0},
    )


def dataset_job(root: str, run_id: str, **kwargs) -> tuple[DatasetJob, str]:
    plan = Plan(tiny_config(root), run_id)
    return plan.dataset(DatasetConfig(fn="arithmetic", kwargs={"max_number": 4, **kwargs})), plan.run_uri


@pytest.mark.parametrize("scope", ["run", "root"])
def test_the_output_of_the_same_job_is_copied_and_says_where_it_comes_from(root: str, tmp_path: Path, scope: str):
    old_job, old_run = dataset_job(root, "old")
    made = commit(old_job, old_run, tmp_path / "files")
    job, run_uri = dataset_job(root, "new")
    found = reuse(job, run_uri, old_run if scope == "run" else root, LOG)
    assert found is not None
    assert found.uri == job.output
    assert found.digest == made.digest  # what depends on it is the same job again
    assert found.reused_from == made.ref
    assert found.summary == made.summary
    filesystem, path = storage.filesystem(old_run)
    filesystem.rm(path, recursive=True)  # the new run is whole without the old one
    _, files = artifacts.fetch(found.ref, tmp_path / "scratch")
    assert (files / "examples.jsonl").read_text() == "{}\n" * 3


def test_another_job_is_not_taken_over_and_the_log_names_the_difference(tmp_path: Path, caplog):
    old_job, old_run = dataset_job(str(tmp_path), "old")
    old_job = old_job.model_copy(update={"source_sha256": "0" * 64})
    commit(old_job, old_run, tmp_path / "files")
    job, run_uri = dataset_job(str(tmp_path), "new")
    with caplog.at_level(logging.INFO):
        assert reuse(job, run_uri, old_run, LOG) is None
    assert "source_sha256" in caplog.text
    assert not storage.exists(f"{job.output}/manifest.json")


def test_a_run_without_that_artifact_is_passed_over(tmp_path: Path):
    _, old_run = dataset_job(str(tmp_path), "old")
    write_run(old_run, "old", tiny_config(str(tmp_path)))
    job, run_uri = dataset_job(str(tmp_path), "new")
    assert reuse(job, run_uri, str(tmp_path), LOG) is None


def test_a_source_that_holds_no_run_is_refused(tmp_path: Path):
    job, run_uri = dataset_job(str(tmp_path), "new")
    with pytest.raises(ValueError, match=r"reuse_from is .*nowhere"):
        reuse(job, run_uri, str(tmp_path / "nowhere"), LOG)
