"""A store that fails: what passes is survived, what does not is a clear error, and no manifest promises too much."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError, InvalidURL
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from deployments.local_service import Service
from forge_core import artifacts, publication, storage, storage_errors
from forge_core.artifacts import ArtifactError, Manifest
from forge_core.storage_errors import StorageUnavailableError, is_transient
from tests.s3_proxy import S3Proxy, proxied


def said(code: str, error: Exception | None = None, *, status: int = 400) -> Exception:
    """An S3 error as the server says it, or as s3fs passes it on."""
    answer: dict[str, Any] = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    cause = ClientError(answer, "PutObject")
    if error is None:
        return cause
    error.__cause__ = cause
    return error


def waited_for() -> Exception:
    """What a primitive inside another one ends with: its minute is over."""
    error = StorageUnavailableError("gone")
    error.__cause__ = ConnectionResetError()
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (said("SlowDown", OSError(errno.EBUSY, "slow down")), True),
        (said("503"), True),
        (said("InternalError", OSError(errno.EREMOTEIO, "internal")), True),
        (said("RequestTimeout", TimeoutError()), True),
        (said("ExpiredToken", PermissionError("expired")), True),
        (ConnectionResetError(), True),
        (ConnectionRefusedError(), True),
        (TimeoutError(), True),
        (EndpointConnectionError(endpoint_url="http://x"), True),
        (OSError(errno.EBUSY, "injected"), True),
        (OSError(errno.EIO, "a code that s3fs does not know"), True),
        (said("SlowDownRead", OSError(errno.EIO, "as MinIO says it")), True),
        (said("429", OSError(errno.EIO, "slow down")), True),
        (said("Odd", OSError(errno.EIO, "an unknown code"), status=503), True),
        (said("Odd", OSError(errno.EIO, "an unknown code"), status=400), False),
        (said("NotImplemented", OSError(errno.ENOSYS, "never"), status=501), False),
        (said("NoSuchUpload", FileNotFoundError("completed by a request whose answer was lost")), True),
        (said("InvalidPart", OSError(errno.EINVAL, "the store lost a part")), True),
        (ClientPayloadError("not enough data"), True),
        (InvalidURL("http://["), False),
        (ResponseParserError("HTML instead of XML"), True),
        (said("AccessDenied", PermissionError("denied")), False),
        (said("NoSuchBucket", FileNotFoundError("bucket")), False),
        (said("PreconditionFailed", OSError(errno.EINVAL, "exists")), False),
        (NoCredentialsError(), False),
        (FileNotFoundError("x"), False),
        (FileExistsError("x"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (waited_for(), False),
        (ValueError("x"), False),
    ],
)
def test_an_error_is_tried_again_only_when_it_may_pass(error: Exception, expected: bool):
    assert is_transient(error) is expected


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a few milliseconds."""
    monkeypatch.setattr(storage_errors, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(storage_errors, "LONGEST_WAIT", 0.05)


@pytest.fixture
def proxy(moto_server: Service, moto_s3: str, quick, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy before moto, to which this process's S3 requests go."""
    with proxied(moto_server.url, monkeypatch) as found:
        yield found


@pytest.fixture
def uri(moto_s3: str, request: pytest.FixtureRequest) -> str:
    return f"{moto_s3}/{abs(hash(request.node.nodeid))}/run/policies/v0001"


def commit(uri: str, directory: Path, files: int = 3) -> Manifest:
    """An artifact of a few small files."""
    directory.mkdir(exist_ok=True)
    for index in range(files):
        (directory / f"{index}.bin").write_bytes(bytes([index]) * 1000)
    return artifacts.commit(
        directory,
        uri,
        kind="policy",
        job={"stage": "start"},
        job_digest="d",
        inputs={},
        summary={},
        software={},
        timings={},
    )


def require_whole(manifest: Manifest, scratch: Path) -> None:
    """The artifact reads back, every file with its SHA-256."""
    _, files = artifacts.fetch(manifest.ref, scratch)
    assert sorted(path.name for path in files.iterdir()) == [record.path for record in manifest.files]


@pytest.mark.parametrize(
    "trouble",
    [
        {"kind": "answer", "status": 503, "code": "SlowDown", "skip": 2},  # the third PUT of the commit
        {"kind": "answer", "status": 500, "code": "InternalError", "times": 3},
        {"kind": "answer", "status": 503, "code": "ServiceUnavailable", "path": "manifest.json"},
        {"kind": "answer", "status": 409, "code": "ConditionalRequestConflict", "path": "manifest.json"},
        {"kind": "reset", "times": 2},
        {"kind": "reset_after", "path": r"1\.bin"},
        {"kind": "swallow", "path": r"1\.bin"},
        {"kind": "delay", "seconds": 0.5, "times": 3},
    ],
    ids=lambda trouble: "-".join(str(value) for value in trouble.values()),
)
def test_a_commit_survives_a_passing_trouble(proxy: S3Proxy, uri: str, tmp_path: Path, trouble: dict):
    proxy.add(**trouble)
    manifest = commit(uri, tmp_path / "files")
    assert proxy.troubles[0].times == 0
    assert artifacts.read_manifest(uri) == manifest
    require_whole(manifest, tmp_path / "scratch")


def test_reads_survive_a_passing_trouble(proxy: S3Proxy, uri: str, tmp_path: Path, caplog):
    manifest = commit(uri, tmp_path / "files")
    proxy.add("answer", method="GET", path="manifest.json", status=500, code="InternalError", times=2)
    proxy.add("reset", method="GET", path=r"0\.bin")
    proxy.add("answer", method="HEAD", path=r"1\.bin", status=503)
    with caplog.at_level(logging.WARNING):
        require_whole(manifest, tmp_path / "scratch")
        assert storage.size(f"{manifest.files_uri}/1.bin") == 1000
    assert "trying again" in caplog.text
    assert [trouble.times for trouble in proxy.troubles] == [0, 0, 0]


def test_a_create_whose_answer_was_lost_counts_as_won(proxy: S3Proxy, uri: str, tmp_path: Path):
    proxy.add("reset_after", path="manifest.json")
    manifest = commit(uri, tmp_path / "files")
    assert proxy.troubles[0].times == 0
    assert artifacts.read_manifest(uri) == manifest
    with pytest.raises(FileExistsError):
        storage.create_exclusive(f"{uri}/manifest.json", b"another")


def test_a_store_that_stays_away_ends_in_a_clear_error_and_no_manifest(
    proxy: S3Proxy, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.5)
    proxy.add("answer", path=r"2\.bin", times=10_000)
    with pytest.raises(StorageUnavailableError, match=r"upload of s3://.*2\.bin failed .*check that the store is up"):
        commit(uri, tmp_path / "files")
    proxy.troubles.clear()
    assert artifacts.read_manifest(uri) is None


def test_a_store_that_keeps_losing_uploads_is_named_and_no_manifest_is_made(proxy: S3Proxy, uri: str, tmp_path: Path):
    proxy.add("swallow", path=r"1\.bin", times=3)
    with pytest.raises(ArtifactError, match=r"1\.bin has None bytes after 3 uploads of 1000; check the store"):
        commit(uri, tmp_path / "files")
    assert artifacts.read_manifest(uri) is None


def test_a_pointer_that_cannot_be_moved_stays_where_it_was(
    proxy: S3Proxy, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.5)
    root, manifest = uri.rsplit("/", 3)[0], commit(uri, tmp_path / "files")
    first = publication.publish(root, "model", manifest.ref, run_id="first", metrics={})
    proxy.add("reset", path="current.json", times=10_000)
    with pytest.raises(StorageUnavailableError, match=r"write of .*/current\.json failed"):
        publication.publish(root, "model", manifest.ref, run_id="second", metrics={})
    proxy.troubles.clear()
    pointer = storage.read_bytes(f"{root}/published/model/current.json")
    assert publication.Publication.model_validate_json(pointer) == first


def test_credentials_that_expire_are_read_anew(
    proxy: S3Proxy, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever renews them writes a file; a filesystem object that lives on would keep the old ones."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = OLD\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    S3FileSystem.clear_instance_cache()
    manifest = commit(uri, tmp_path / "files")

    def is_old(headers: dict[str, str]) -> bool:
        renewed = file.read_text().replace("OLD", "NEW")
        is_expired = "Credential=OLD/" in headers.get("Authorization", "")
        if is_expired:
            file.write_text(renewed)
        return is_expired

    proxy.add("answer", method="GET", status=400, code="ExpiredToken", times=100, only_if=is_old)
    require_whole(manifest, tmp_path / "scratch")
    assert proxy.troubles[0].times < 100


def test_credentials_that_stay_expired_are_a_clear_error(proxy: S3Proxy, uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.5)
    proxy.add("answer", method="GET", status=400, code="ExpiredToken", times=10_000)
    with pytest.raises(PermissionError, match="the credentials in the environment have expired, renew them"):
        storage.read_bytes(f"{uri}/manifest.json")


def test_more_than_a_thousand_objects_are_listed(moto_s3: str):
    fs, bucket = storage.filesystem(moto_s3)
    for index in range(1100):
        fs.call_s3("put_object", Bucket=bucket, Key=f"many/{index:04d}", Body=b"")
    assert storage.list_names(f"{moto_s3}/many") == [f"{index:04d}" for index in range(1100)]


POLL = """
import sys, time
from forge_core import artifacts, storage
uri, scratch = sys.argv[1], __import__("pathlib").Path(sys.argv[2])
print(storage.list_names(uri), flush=True)
while (manifest := artifacts.read_manifest(uri)) is None:
    time.sleep(0.01)
artifacts.fetch(manifest.ref, scratch)
print(len(storage.list_names(uri)), flush=True)
"""


def test_a_reader_in_another_process_sees_a_commit_at_once_and_whole(moto_s3: str, tmp_path: Path):
    uri = f"{moto_s3}/polled/run/policies/v0001"
    command = [sys.executable, "-c", POLL, uri, str(tmp_path / "scratch")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == "[]"  # it has listed the prefix while it was empty
        commit(uri, tmp_path / "files", files=20)
        assert reader.stdout.readline().strip() == "2"  # the manifest and the attempt
        assert reader.wait() == 0
