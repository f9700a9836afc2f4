"""Answers that get lost, stores that hang, uploads in parts and full disks: what storage does by its defaults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from deployments.local_service import Service
from forge_core import artifacts, publication, storage, storage_errors
from forge_core.multipart import abort_upload, incomplete_uploads
from forge_core.storage_errors import StorageUnavailableError
from tests.s3_proxy import S3Proxy, proxied

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
ALWAYS = 10_000


@pytest.fixture
def proxy(moto_server: Service, moto_s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy before moto; pauses take milliseconds, and parts are as small as S3 allows."""
    monkeypatch.setattr(storage_errors, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(storage_errors, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(storage, "PART_BYTES", 5 * MIB)
    with proxied(moto_server.url, monkeypatch) as found:
        yield found


@pytest.fixture
def place(moto_s3: str, tmp_path: Path) -> str:
    """A prefix in moto that no other test uses."""
    return f"{moto_s3}/{tmp_path.name}"


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A directory with one file of three parts, 12 MiB."""
    directory = tmp_path / "big"
    directory.mkdir()
    (directory / "w.bin").write_bytes(bytes(range(256)) * (12 * MIB // 256))
    return directory


def commit(uri: str, directory: Path) -> artifacts.Manifest:
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


@pytest.mark.parametrize("is_warm", [False, True], ids=["new connection", "kept connection"])
def test_the_answer_to_a_create_gets_lost_and_it_has_won(proxy: S3Proxy, place: str, is_warm: bool):
    # aiohttp by itself sends a PUT again when a connection it kept breaks: the first error seen is then "exists".
    if is_warm:
        storage.write_atomic(f"{place}/warm", b"")
    trouble = proxy.add("reset_after", path="/one$")
    storage.create_exclusive(f"{place}/one", b"mine")
    assert trouble.times == 0
    assert storage.read_bytes(f"{place}/one") == b"mine"


def test_another_writers_object_is_a_lost_race_also_after_a_lost_answer(proxy: S3Proxy, place: str):
    storage.create_exclusive(f"{place}/one", b"theirs")
    proxy.add("reset_after", path="/one$")
    with pytest.raises(FileExistsError):
        storage.create_exclusive(f"{place}/one", b"mine")


@pytest.mark.parametrize("code", ["SlowDown", "InternalError"])
def test_a_request_is_sent_once_a_try(proxy: S3Proxy, place: str, monkeypatch: pytest.MonkeyPatch, code: str):
    """s3fs and botocore retry too: together they sent one failing read 25 times before it was seen here."""
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.0)
    proxy.add("answer", method="GET", status=503, code=code, times=ALWAYS)
    with pytest.raises(StorageUnavailableError, match="failed 4 times"):
        storage.read_bytes(f"{place}/x")
    assert len(proxy.seen) == 4  # MIN_TRIES


def test_a_store_that_hangs_is_given_up_after_a_few_read_timeouts(
    proxy: S3Proxy, place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.0)
    monkeypatch.setattr(S3FileSystem, "read_timeout", 0.2)
    S3FileSystem.clear_instance_cache()
    proxy.add("hang", method="GET", times=ALWAYS)
    with pytest.raises(StorageUnavailableError, match="ReadTimeoutError"):
        storage.read_bytes(f"{place}/x")
    assert len(proxy.seen) == 4


def test_an_answer_that_breaks_off_is_asked_for_again(proxy: S3Proxy, place: str, tmp_path: Path):
    storage.write_atomic(f"{place}/x", b"0123456789" * 1000)
    proxy.add("cut", method="GET", path="/x$", times=2)
    assert storage.read_bytes(f"{place}/x") == b"0123456789" * 1000
    proxy.add("cut", method="GET", path="/x$")
    storage.download(f"{place}/x", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"0123456789" * 1000


def test_expired_credentials_are_recognised_where_the_answer_has_no_body(
    proxy: S3Proxy, place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.0)
    storage.write_atomic(f"{place}/x", b"x")
    for method in ("HEAD", "GET"):
        proxy.add("answer", method=method, status=403, code="ExpiredToken", times=ALWAYS)
    for ask in (storage.size, storage.exists):
        with pytest.raises(PermissionError, match="the credentials in the environment have expired"):
            ask(f"{place}/x")


def test_denied_access_passes_through_at_once(proxy: S3Proxy, place: str):
    proxy.add("answer", method="GET", status=403, code="AccessDenied", times=ALWAYS)
    with pytest.raises(PermissionError, match="by the proxy"):
        storage.read_bytes(f"{place}/x")
    assert len(proxy.seen) == 1


def test_credentials_in_an_endpoint_are_refused_without_repeating_them(moto_s3: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://key:sesame@127.0.0.1:1")
    with pytest.raises(ValueError, match="AWS_ENDPOINT_URL_S3 holds credentials") as caught:
        storage.read_bytes(f"{moto_s3}/x")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "trouble",
    [
        {"kind": "truncate", "path": r"partNumber=3"},  # the last part may be short: only the size of the object tells
        {"kind": "truncate", "path": r"partNumber=2"},  # the store refuses a short part in the middle
        {"kind": "swallow", "path": r"partNumber=2"},
        {"kind": "reset", "path": r"partNumber=2", "times": 3},
        {"kind": "answer", "path": r"partNumber=2", "times": 4, "code": "ServiceUnavailable"},
        {"kind": "reset_after", "path": r"uploadId=", "method": "POST"},  # completed, and the answer is lost
    ],
    ids=lambda trouble: "-".join(str(value) for value in trouble.values()),
)
def test_a_commit_of_a_file_in_parts_survives(proxy: S3Proxy, place: str, big: Path, tmp_path: Path, trouble: dict):
    proxy.add(**trouble)
    manifest = commit(f"{place}/v1", big)
    assert proxy.troubles[0].times == 0
    _, files = artifacts.fetch(manifest.ref, tmp_path / "scratch")
    assert (files / "w.bin").read_bytes() == (big / "w.bin").read_bytes()
    assert incomplete_uploads(place) == []


def test_a_torn_upload_is_repeated(proxy: S3Proxy, place: str, tmp_path: Path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(b"0123456789")
    trouble = proxy.add("truncate", path=r"a\.bin", times=2)
    manifest = commit(f"{place}/v1", tmp_path / "files")
    assert trouble.times == 0
    assert storage.read_bytes(f"{manifest.files_uri}/a.bin") == b"0123456789"


def test_parts_that_cannot_be_uploaded_are_aborted(
    proxy: S3Proxy, place: str, big: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.0)
    proxy.add("answer", path=r"partNumber=2", times=ALWAYS, status=400, code="InvalidRequest")
    with pytest.raises(OSError, match="by the proxy"):
        commit(f"{place}/v1", big)
    assert artifacts.read_manifest(f"{place}/v1") is None
    assert incomplete_uploads(place) == []


def test_a_fetch_that_fails_leaves_nothing_in_scratch(proxy: S3Proxy, place: str, big: Path, tmp_path: Path):
    (big / "a.bin").write_bytes(b"a")
    manifest = commit(f"{place}/v1", big)
    proxy.add("answer", method="GET", path=r"w\.bin", times=ALWAYS, status=403, code="AccessDenied")
    with pytest.raises(PermissionError):
        artifacts.fetch(manifest.ref, tmp_path / "scratch")
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []


def test_no_secret_is_logged_or_told(proxy: S3Proxy, place: str, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(storage_errors, "GIVE_UP_AFTER", 0.0)
    proxy.add("reset", times=ALWAYS)
    with pytest.raises(StorageUnavailableError) as caught:
        storage.write_atomic(f"{place}/x", b"x")
    assert f"write of {place}/x failed" in caplog.text
    for secret in (os.environ["AWS_SECRET_ACCESS_KEY"], "Authorization", "Signature"):
        assert secret not in caplog.text + str(caught.value)


@pytest.mark.slow
def test_lost_answers_of_a_store_on_disk(
    seaweed_server: Service, seaweed_s3: str, big: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage_errors, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(storage, "PART_BYTES", 5 * MIB)
    with proxied(seaweed_server.url, monkeypatch) as proxy:
        proxy.add("reset_after", path="/one$")
        storage.create_exclusive(f"{seaweed_s3}/bounds/one", b"mine")
        with pytest.raises(FileExistsError):
            storage.create_exclusive(f"{seaweed_s3}/bounds/one", b"another's")
        proxy.add("reset", path=r"partNumber=2", times=2)
        proxy.add("reset_after", path=r"uploadId=", method="POST")
        manifest = commit(f"{seaweed_s3}/bounds/v1", big)
        assert [trouble.times for trouble in proxy.troubles] == [0, 0, 0]
        assert storage.read_bytes(f"{manifest.files_uri}/w.bin") == (big / "w.bin").read_bytes()
        assert incomplete_uploads(f"{seaweed_s3}/bounds") == []


def run_until_struck(proxy: S3Proxy, code: str, *arguments: str) -> None:
    """Kill a process that runs `code` while one of its requests hangs in the proxy."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=REPOSITORY) as process:
        assert proxy.struck.wait(120)
        process.kill()


UPLOAD = """
import sys
from pathlib import Path
from forge_core import storage
storage.PART_BYTES = 5 * 2**20
storage.upload(Path(sys.argv[1]), sys.argv[2])
"""


def test_parts_of_a_killed_upload_are_found_and_aborted(proxy: S3Proxy, place: str, big: Path):
    proxy.add("hang", path=r"partNumber=2")
    run_until_struck(proxy, UPLOAD, str(big / "w.bin"), f"{place}/w.bin")
    assert not storage.exists(f"{place}/w.bin")
    [upload] = incomplete_uploads(place)
    assert upload.uri == f"{place}/w.bin"
    abort_upload(upload)
    assert incomplete_uploads(place) == []


PUBLISH = """
import sys
from forge_core import publication
from forge_core.artifacts import Ref
publication.publish(sys.argv[1], "model", Ref.model_validate_json(sys.argv[2]), run_id="second", metrics={})
"""


def test_a_publisher_killed_before_the_pointer_moved_leaves_the_old_one(proxy: S3Proxy, place: str, tmp_path: Path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(b"a")
    old, new = commit(f"{place}/run/policies/v0001", tmp_path / "files"), commit(f"{place}/v2", tmp_path / "files")
    first = publication.publish(place, "model", old.ref, run_id="first", metrics={})
    proxy.add("hang", path="current.json")
    run_until_struck(proxy, PUBLISH, place, new.ref.model_dump_json())
    pointer = storage.read_bytes(f"{place}/published/model/current.json")
    assert publication.Publication.model_validate_json(pointer) == first


FILL = """
import sys
from pathlib import Path
from forge_core import storage
full, large, action = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
try:
    if action == "create":
        storage.create_exclusive(f"{full}/run/v0001/manifest.json", large.read_bytes())
    if action == "write":
        storage.write_atomic(f"{full}/run/current.json", large.read_bytes())
    if action == "upload":
        storage.upload(large, f"{full}/run/v0001/attempt/large")
    if action == "download":
        storage.download(str(large), full / "scratch" / "large")
except OSError as error:
    sys.stdout.write(f"{error} {[path.name for path in full.rglob('*') if path.is_file()]}")
"""


@pytest.mark.parametrize("action", ["create", "write", "upload", "download"])
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path, action: str):
    full, large = tmp_path / "full", tmp_path / "large"
    full.mkdir()
    large.write_bytes(b"x" * 1_000_000)
    mount = f'mount -t tmpfs -o size=200k tmpfs {full} && exec "$@"'  # 200 kB that only the child sees
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (refused := subprocess.run([*isolated, mount, "sh", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"the kernel refuses a mount of one's own: {refused.stderr.strip()[-200:]}")
    command = [*isolated, mount, "sh", sys.executable, "-c", FILL, str(full), str(large), action]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert "no space left; free space or set TMPDIR / root elsewhere" in done.stdout
    assert str(full) in done.stdout
    assert done.stdout.endswith("[]")  # neither an object nor a pending file
