"""Garbage collection: what writers leave behind that were killed, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from forge_core import artifacts, gc, listing, storage
from forge_core.artifacts import Manifest, Ref
from forge_core.holds import Hold, hold
from forge_core.multipart import abort_upload, incomplete_uploads
from forge_core.publication import publish
from forge_core.retention import Pruned

ATTEMPT = "20260101T000000-0123abcd"

COMMIT_AND_DIE = """
import os, sys
from pathlib import Path
from forge_core import artifacts
artifacts.commit(
    Path(sys.argv[1]), sys.argv[2], kind="policy", job={}, job_digest="j", inputs={}, summary={}, software={},
    timings={}, on_uploaded=lambda: os._exit(9),
)
"""


def commit(source: Path, uri: str) -> Manifest:
    return artifacts.commit(
        source, uri, kind="policy", job={}, job_digest="j", inputs={}, summary={}, software={}, timings={}
    )


def die_before_the_manifest(source: Path, uri: str) -> None:
    died = subprocess.run([sys.executable, "-c", COMMIT_AND_DIE, str(source), uri], check=False)
    assert died.returncode == 9


def write(uri: str, size: int = 1) -> None:
    storage.write_atomic(uri, b"x" * size)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "deep").mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"12345")
    (directory / "deep" / "config.json").write_bytes(b"{}")
    return directory


def found(root: str, run_id: str | None = None) -> dict[str, str]:
    """What is found, by its place in the root."""
    return {finding.uri.removeprefix(f"{root}/"): finding.what for finding in gc.find_garbage(root, run_id=run_id)}


def collected(root: str, *, older_than_hours: float = 0, delete: bool = True, run_id: str | None = None) -> list[str]:
    return list(gc.report(root, run_id=run_id, older_than_hours=older_than_hours, delete=delete))


def in_a_root_of_each_kind(test: Callable) -> Callable:
    """With moto's S3 and a local directory: a second process must reach the store."""
    return pytest.mark.parametrize("root", ["file", "s3"], indirect=True)(test)


@in_a_root_of_each_kind
def test_a_killed_writer_leaves_an_attempt_that_is_shown_and_then_removed(root: str, source: Path, tmp_path: Path):
    committed = commit(source, f"{root}/run/policies/v0001")
    die_before_the_manifest(source, f"{root}/run/policies/v0001")
    die_before_the_manifest(source, f"{root}/run/policies/v0002")
    garbage = gc.find_garbage(root)
    assert sorted(finding.what for finding in garbage) == ["abandoned attempt", "attempt that lost"]
    assert [finding.num_bytes for finding in garbage] == [7, 7]

    lines = collected(root, delete=False)
    assert lines[-2:] == ["2 things, 0.000 MB; 0 more are younger than 0 h", "nothing was deleted; add --delete"]
    assert len(gc.find_garbage(root)) == 2
    assert collected(root)[-1] == "deleted"
    assert gc.find_garbage(root) == []
    _, directory = artifacts.fetch(committed.ref, tmp_path / "scratch")
    assert (directory / "model.safetensors").read_bytes() == b"12345"


def test_a_writer_that_may_be_alive_is_left_alone(root: str, source: Path):
    write(f"{root}/run/policies/v0001/{ATTEMPT}/model.safetensors", 3)
    lines = collected(root, older_than_hours=1)
    assert lines == ["0 things, 0.000 MB; 1 more are younger than 1 h", "deleted"]
    assert len(gc.find_garbage(root)) == 1


def test_a_writer_that_commits_while_garbage_is_collected_keeps_its_files(root: str, source: Path, tmp_path: Path):
    manifest = commit(source, f"{root}/run/policies/v0001")
    content = storage.read_bytes(f"{manifest.uri}/manifest.json")
    listing.delete_object(f"{manifest.uri}/manifest.json")
    [attempt] = gc.find_garbage(root)
    storage.create_exclusive(f"{manifest.uri}/manifest.json", content)
    assert not gc.collect(attempt)
    artifacts.fetch(manifest.ref, tmp_path / "scratch")


def expired(root: str, digest: str, seconds: float) -> str:
    now = datetime.now(UTC)
    ref = Ref(kind="policy", uri=f"{root}/run/policies/v0001", digest=digest)
    content = Hold(ref=ref, holder="host:1", reason="test", created_at=now, expires_at=now - timedelta(seconds=seconds))
    uri = f"{root}/holds/{digest}/0123.json"
    storage.create_exclusive(uri, content.model_dump_json().encode())
    return uri


def test_each_kind_of_garbage_is_told_from_what_is_promised(root: str, source: Path):
    for place in ("policies/v0001", "rollouts/v0001", "scored/v0001", "evals/v0001/heldout", "datasets/sums-0123"):
        commit(source, f"{root}/run/{place}")
        write(f"{root}/run/{place}/{ATTEMPT}/file")
    commit(source, f"{root}/run/train_states/v0001")
    publish(root, "name", commit(source, f"{root}/run/policies/v0002").ref, run_id="run", metrics={})
    for name in ("run.json", "drill/events/1.json", f"drill/{ATTEMPT}/file", "drill/.report.json.0123abcd"):
        write(f"{root}/run/{name}")
    expired(root, "past", 60)
    expired(root, "future", -60)
    for name in (".probe-0123456789abcdef", "..probe-0123456789abcdef.0123abcd", "run/.run.json.0123abcd"):
        write(f"{root}/{name}")
    write(f"{root}/run/policies/v0003/.manifest.json.0123abcd")
    for name in ("notes.txt", "run/policies/v0001/notes.txt", "run/other/a", "run/other/b", "published/name/old.json"):
        write(f"{root}/{name}")

    expected = {
        f"run/policies/v0001/{ATTEMPT}": "attempt that lost",
        f"run/rollouts/v0001/{ATTEMPT}": "attempt that lost",
        f"run/scored/v0001/{ATTEMPT}": "attempt that lost",
        f"run/evals/v0001/heldout/{ATTEMPT}": "attempt that lost",
        f"run/datasets/sums-0123/{ATTEMPT}": "attempt that lost",
        "holds/past/0123.json": "expired hold",
        ".probe-0123456789abcdef": "probe",
        "..probe-0123456789abcdef.0123abcd": "pending file",
        "run/.run.json.0123abcd": "pending file",
        "run/policies/v0003/.manifest.json.0123abcd": "pending file",
        "notes.txt": "unknown",
        "run/policies/v0001": "unknown",
        "run/other": "unknown",
        "published/name": "unknown",
    }
    assert found(root) == expected
    before = {stored.path for stored in listing.list_objects(root)}
    lines = collected(root)
    assert sum("left alone" in line for line in lines) == 4
    unknown = {name: what for name, what in expected.items() if what == "unknown"}
    assert found(root) == unknown
    after = {stored.path for stored in listing.list_objects(root)}
    gone = {name for name in before if any(name.startswith(place) for place in expected.keys() - unknown.keys())}
    assert before - after == gone


def test_one_run_alone(root: str):
    for run in ("one", "other"):
        write(f"{root}/{run}/policies/v0001/{ATTEMPT}/file")
    write(f"{root}/.probe-0123456789abcdef")
    assert found(root, "one") == {f"one/policies/v0001/{ATTEMPT}": "abandoned attempt"}
    collected(root, run_id="one")
    assert set(found(root)) == {f"other/policies/v0001/{ATTEMPT}", ".probe-0123456789abcdef"}


def test_an_attempt_beside_an_unreadable_manifest_is_left_alone(root: str):
    write(f"{root}/run/policies/v0001/{ATTEMPT}/file")
    write(f"{root}/run/policies/v0001/manifest.json")
    assert found(root) == {f"run/policies/v0001/{ATTEMPT}": "unknown, its manifest cannot be read"}
    collected(root)
    assert len(listing.list_objects(root)) == 2


def mark(manifest: Manifest) -> None:
    content = Pruned(pruned_at=datetime.now(UTC), rule="by hand")
    storage.write_atomic(f"{manifest.uri}/pruned.json", content.model_dump_json().encode())


def test_a_half_pruned_artifact_loses_the_rest_once_its_pruner_must_be_dead(
    root: str, source: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = commit(source, f"{root}/run/policies/v0001")
    mark(manifest)
    assert found(root) == {f"run/policies/v0001/{manifest.attempt}": "half-pruned"}
    collected(root)  # even without an age limit: its pruner may be about to withdraw
    assert len(listing.list_objects(manifest.files_uri)) == 2
    later = gc.time.time() + 301
    monkeypatch.setattr("time.time", lambda: later)
    collected(root)
    assert [stored.path for stored in listing.list_objects(manifest.uri)] == ["manifest.json", "pruned.json"]


def test_a_half_pruned_artifact_that_is_held_is_left_alone(root: str, source: Path):
    manifest = commit(source, f"{root}/run/policies/v0001")
    with hold(root, manifest.ref, "reading"):
        mark(manifest)
        assert found(root) == {}


def test_a_root_that_holds_nothing_is_an_error(root: str):
    with pytest.raises(ValueError, match="holds nothing; check the path"):
        gc.find_garbage(f"{root}/misspelt")


def test_the_command_shows_and_deletes(tmp_path: Path):
    write(f"{tmp_path}/store/run/policies/v0001/{ATTEMPT}/file", 2_000_000)
    command = [sys.executable, "-m", "forge_core.gc", f"{tmp_path}/store", "--older-than-hours", "0"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "abandoned attempt" in shown
    assert "1 things, 2.000 MB" in shown
    assert shown.endswith("nothing was deleted; add --delete\n")
    deleted = subprocess.run([*command, "--delete"], check=True, capture_output=True, text=True).stdout
    assert deleted.endswith("deleted\n")
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert failed.returncode == 2
    assert "holds nothing" in failed.stderr


def begin_upload(root: str, name: str) -> None:
    fs, path = storage.filesystem(f"{root}/{name}")
    bucket, _, key = path.partition("/")
    answer = fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    fs.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=answer["UploadId"], PartNumber=1, Body=b"x" * 5_000_000)


@pytest.mark.parametrize("server", ["moto_s3", pytest.param("seaweed_s3", marks=pytest.mark.slow)])
def test_incomplete_uploads_of_a_root_are_aborted(server: str, request: pytest.FixtureRequest):
    bucket = request.getfixturevalue(server)
    name = f"run/policies/v0001/{ATTEMPT}/model.safetensors"
    begin_upload(f"{bucket}/here", name)
    begin_upload(f"{bucket}/elsewhere", name)
    [finding] = gc.find_garbage(f"{bucket}/here")
    assert (finding.what, finding.uri, finding.num_bytes) == ("incomplete upload", f"{bucket}/here/{name}", 5_000_000)
    collected(f"{bucket}/here")
    assert incomplete_uploads(f"{bucket}/here") == []
    [other] = incomplete_uploads(f"{bucket}/elsewhere")
    abort_upload(other)
    abort_upload(other)  # aborted by somebody else: no error


@pytest.mark.slow
@pytest.mark.parametrize("server", ["moto_s3", "seaweed_s3"])
def test_more_objects_than_a_page_of_a_listing(server: str, request: pytest.FixtureRequest, source: Path):
    root = f"{request.getfixturevalue(server)}/many"
    manifest = commit(source, f"{root}/run/policies/v0001")
    fs, path = storage.filesystem(f"{root}/run/policies/v0001/{ATTEMPT}")
    assert not fs.exists(path)  # s3fs connects here; a first call of 1,100 requests would open a session for each
    fs.pipe({f"{path}/shard-{number:04d}": b"x" for number in range(1_100)}, batch_size=50)
    [finding] = gc.find_garbage(root)
    assert finding.num_bytes == 1_100
    collected(root)
    assert gc.find_garbage(root) == []
    # model.safetensors, deep/config.json and the manifest
    assert len(listing.list_objects(root)) == 3
    assert len(listing.list_objects(manifest.files_uri)) == 2
