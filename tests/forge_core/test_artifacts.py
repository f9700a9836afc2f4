"""The commit rule: an artifact is complete or absent, has exactly one author, and is what its digest says."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Manifest


def commit(directory: Path, uri: str, *, seed: int = 0) -> Manifest:
    job = {"stage": "dataset", "output": uri, "seed": seed}
    return artifacts.commit(
        directory,
        uri,
        kind="dataset",
        job=job,
        job_digest=artifacts.sha256_json({"seed": seed}),
        inputs={},
        summary={"dataset/examples": 1},
        software={},
        timings={},
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "deep").mkdir(parents=True)
    (directory / "a.txt").write_text("alpha")
    (directory / "deep" / "b.bin").write_bytes(b"\0beta")
    return directory


def test_a_committed_artifact_reads_back_byte_for_byte(root: str, source: Path, tmp_path: Path):
    manifest = commit(source, f"{root}/policies/v0001")
    found, directory = artifacts.fetch(manifest.ref, tmp_path / "scratch")
    assert found == manifest
    assert (directory / "a.txt").read_text() == "alpha"
    assert (directory / "deep" / "b.bin").read_bytes() == b"\0beta"
    assert [file.path for file in found.files] == ["a.txt", "deep/b.bin"]


def test_nothing_is_there_before_the_manifest(root: str, source: Path):
    uri = f"{root}/policies/v0002"
    storage.upload(source / "a.txt", f"{uri}/attempt/a.txt")
    assert artifacts.read_manifest(uri) is None


def test_a_second_writer_of_the_same_job_adopts_the_first_one(root: str, source: Path):
    first = commit(source, f"{root}/x")
    (source / "a.txt").write_text("something else")
    second = commit(source, f"{root}/x")
    assert second == first


def test_a_writer_of_another_job_fails_and_names_the_difference(root: str, source: Path):
    commit(source, f"{root}/x", seed=1)
    with pytest.raises(ArtifactError, match=r"seed \(1 there, 2 here\)"):
        commit(source, f"{root}/x", seed=2)


def test_a_flipped_byte_is_detected(tmp_path: Path, source: Path):
    manifest = commit(source, f"{tmp_path}/store/x")
    path = storage.local_path(f"{manifest.files_uri}/a.txt")
    assert path is not None
    path.write_text("alphb")
    with pytest.raises(ArtifactError, match=r"a\.txt does not have the SHA-256"):
        artifacts.fetch(manifest.ref, tmp_path)


def test_a_missing_file_is_detected(tmp_path: Path, source: Path):
    manifest = commit(source, f"{tmp_path}/store/x")
    path = storage.local_path(f"{manifest.files_uri}/deep/b.bin")
    assert path is not None
    path.unlink()
    with pytest.raises(ArtifactError, match=r"deep/b\.bin is missing"):
        artifacts.fetch(manifest.ref, tmp_path)


def test_a_reference_to_another_digest_is_refused(root: str, source: Path, tmp_path: Path):
    ref = commit(source, f"{root}/x").ref
    with pytest.raises(ArtifactError, match="the job needs 0000"):
        artifacts.fetch(ref.model_copy(update={"digest": "0000"}), tmp_path)


def test_the_digest_does_not_depend_on_where_or_when(root: str, source: Path):
    assert commit(source, f"{root}/x").digest == commit(source, f"{root}/y").digest


def test_one_of_sixteen_concurrent_creates_wins(root: str):
    outcomes: list[str] = []

    def create(writer: int) -> None:
        try:
            storage.create_exclusive(f"{root}/race", str(writer).encode())
            outcomes.append("won")
        except FileExistsError:
            outcomes.append("lost")

    threads = [threading.Thread(target=create, args=(writer,)) for writer in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost"] * 15 + ["won"]


def _commit_in_process(source: str, uri: str, number: int) -> str:
    directory = Path(source).parent / f"source-{number}"
    directory.mkdir()
    (directory / "a.txt").write_text(f"by {number}")
    return commit(directory, uri).attempt


def test_processes_that_race_to_commit_all_end_with_the_same_manifest(tmp_path: Path, source: Path):
    uri = f"{tmp_path}/store/x"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        attempts = pool.starmap(_commit_in_process, [(str(source), uri, number) for number in range(3)])
    assert len(set(attempts)) == 1


def test_a_store_that_honours_create_only_writes_is_accepted(root: str):
    storage.require_exclusive_create(root)
    assert storage.list_names(root) == []  # the probe is gone


def test_a_store_that_overwrites_is_refused_unless_there_is_one_writer(overwriting_root: str):
    with pytest.raises(ValueError, match="single_writer=true"):
        storage.require_exclusive_create(overwriting_root)
    storage.require_exclusive_create(overwriting_root, single_writer=True)


def test_an_unwritable_root_is_a_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ValueError, match="cannot be written"):
        storage.require_exclusive_create(f"{tmp_path}/file/store")


def test_credentials_in_a_uri_are_refused_without_repeating_them():
    with pytest.raises(ValueError, match="environment") as caught:
        storage.absolute_uri("s3://key:sesame@bucket/path")
    assert "sesame" not in str(caught.value)


def test_a_reader_sees_what_another_filesystem_object_has_just_written(root: str, source: Path):
    assert storage.list_names(f"{root}/policies") == []
    commit(source, f"{root}/policies/v0001")
    assert storage.list_names(f"{root}/policies") == ["v0001"]
    commit(source, f"{root}/policies/v0002")
    assert storage.list_names(f"{root}/policies") == ["v0001", "v0002"]
    assert artifacts.read_manifest(f"{root}/policies/v0002") is not None


def test_a_pointer_is_replaced_whole(root: str):
    for text in (b"first, and longer", b"second"):
        storage.write_atomic(f"{root}/published/name/current.json", text)
        assert storage.read_bytes(f"{root}/published/name/current.json") == text
