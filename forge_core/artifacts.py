"""Artifacts: directories that exist once their manifest does.

    {uri}/manifest.json      the commit record, created last and only once
    {uri}/{attempt}/...      the files of the attempt that won
    {uri}/pruned.json        retention has taken the files; the manifest stays, for lineage and resume

A writer uploads under a fresh attempt prefix and then creates the manifest. Readers go through the manifest and check
the SHA-256 of every file they use, so an artifact is either complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from forge_core import storage
from forge_core.settings import Settings

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
UPLOAD_ATTEMPTS = 3
Kind = (
    Literal["dataset", "overlap", "policy", "train_state", "rollouts", "reference_logprobs"]
    | Literal["scored", "eval", "quantized_policy", "reward_model"]
)


class ArtifactError(RuntimeError):
    """Stored data is missing, damaged, or not what a job was promised."""


def _below(path: str) -> str:
    """A manifest may come from anywhere, and its readers write files of these names."""
    if "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} leads out of the artifact")
    return path


def _one_name(attempt: str) -> str:
    if "/" in attempt:
        raise ValueError(f"{attempt!r} is not the name of an attempt")
    return _below(attempt)


class Ref(Settings):
    """A committed artifact: where it is, and what it must turn out to be."""

    kind: Kind
    uri: str
    digest: str


class FileRecord(Settings):
    """One file of an artifact; `path` is relative to the attempt's prefix, and stays below it."""

    path: Annotated[str, AfterValidator(_below)]
    num_bytes: int
    sha256: str


class Manifest(Settings):
    """The commit record of an artifact: what it is, what it was made from, by which job, with which software."""

    schema_version: int = SCHEMA_VERSION
    kind: Kind
    uri: str
    attempt: Annotated[str, AfterValidator(_one_name)]
    files: tuple[FileRecord, ...]
    inputs: dict[str, Ref]
    job: dict[str, JsonValue]
    job_digest: str
    digest: str = Field(description="SHA-256 over the job digest and every file: provenance and content in one")
    summary: dict[str, float | int] = Field(description="Metrics under their tracking names")
    software: dict[str, str]
    timings: dict[str, float] = Field(description="Seconds by phase")
    created_at: str
    reused_from: Ref | None = Field(None, description="The artifact of another run that this one is a copy of")

    @property
    def ref(self) -> Ref:
        return Ref(kind=self.kind, uri=self.uri, digest=self.digest)

    def sha256_of(self, path: str) -> str:
        """SHA-256 of one file; raises ArtifactError when the artifact has no such file."""
        for record in self.files:
            if record.path == path:
                return record.sha256
        raise ArtifactError(f"{self.uri} has no {path}; it has {', '.join(record.path for record in self.files)}")

    @property
    def files_uri(self) -> str:
        """Prefix under which the files lie."""
        return f"{self.uri}/{self.attempt}"


def canonical_json(value: object) -> bytes:
    """The same bytes for equal JSON values, whatever the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_json(value: object) -> str:
    """Hex SHA-256 of a JSON value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def read_manifest(uri: str) -> Manifest | None:
    """The manifest of a committed artifact, None when there is none; raises ArtifactError when it is unreadable."""
    try:
        return Manifest.model_validate_json(storage.read_bytes(f"{uri}/manifest.json"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactError(f"{uri}/manifest.json is not a manifest of schema {SCHEMA_VERSION}: {error}") from error


def resolve(ref: Ref) -> Manifest:
    """The manifest behind a reference; raises ArtifactError when it is gone or another artifact took its place."""
    manifest = read_manifest(ref.uri)
    if manifest is None:
        raise ArtifactError(f"{ref.uri} has no manifest.json; it was deleted or never committed")
    if manifest.uri != ref.uri:
        raise ArtifactError(
            f"{ref.uri} has the manifest of {manifest.uri}; artifacts are read where they were committed"
        )
    if manifest.digest != ref.digest:
        raise ArtifactError(f"{ref.uri} holds digest {manifest.digest}, the job needs {ref.digest}")
    return manifest


def is_pruned(uri: str) -> bool:
    """Whether retention has taken the files of an artifact, or is about to."""
    return storage.exists(f"{uri}/pruned.json")


def require_unpruned(uri: str) -> None:
    """Raise ArtifactError when an artifact is pruned."""
    if is_pruned(uri):
        raise ArtifactError(
            f"retention pruned the files of {uri}; its manifest is all that is left. Make it again by replaying the "
            "run, and raise retention.keep_last to keep more versions"
        )


def fetch(ref: Ref, scratch: Path) -> tuple[Manifest, Path]:
    """The manifest and a local directory with the artifact's files, every one checked against its SHA-256.

    A local store is read in place; anything else is downloaded once per scratch directory. Raises ArtifactError when
    the files were pruned, also while they were being read.
    """
    manifest = resolve(ref)
    cached = scratch / "artifacts" / ref.digest
    if storage.local_path(manifest.files_uri) is None and cached.exists():
        return manifest, cached
    require_unpruned(ref.uri)
    try:
        return manifest, _fetch_files(manifest, cached)
    except (ArtifactError, FileNotFoundError) as error:
        require_unpruned(ref.uri)
        if isinstance(error, FileNotFoundError):
            raise ArtifactError(f"{manifest.files_uri} lacks a file that its manifest promises: {error}") from error
        raise


def _fetch_files(manifest: Manifest, cached: Path) -> Path:
    local = storage.local_path(manifest.files_uri)
    if local is not None:
        _verify(manifest, local)
        return local
    partial = cached.with_name(f"{manifest.digest}.{secrets.token_hex(4)}")
    try:
        for record in manifest.files:
            storage.download(f"{manifest.files_uri}/{record.path}", partial / record.path)
        _verify(manifest, partial)
    except BaseException:  # a full disk must not stay full of what nobody will look for
        shutil.rmtree(partial, ignore_errors=True)
        raise
    try:
        partial.rename(cached)
    except OSError:  # another process on this machine fetched the same digest first
        shutil.rmtree(partial)
    return cached


def commit(
    directory: Path,
    uri: str,
    *,
    kind: Kind,
    job: dict[str, JsonValue],
    job_digest: str,
    inputs: dict[str, Ref],
    summary: dict[str, float | int],
    software: dict[str, str],
    timings: dict[str, float],
    on_uploaded: Callable[[], None] | None = None,
) -> Manifest:
    """Upload `directory` and commit it at `uri`; returns the manifest that stands there in the end.

    When another writer committed the same job first, its manifest is adopted. Raises ArtifactError when a different job
    did.
    """
    started = time.perf_counter()
    attempt = new_attempt()
    files = tuple(_records(directory))
    for record in files:
        _upload(directory / record.path, f"{uri}/{attempt}/{record.path}", record.num_bytes)
    manifest = Manifest(
        kind=kind,
        uri=uri,
        attempt=attempt,
        files=files,
        inputs=inputs,
        job=job,
        job_digest=job_digest,
        digest=sha256_json([job_digest, [[file.path, file.sha256] for file in files]]),
        summary=summary,
        software=software,
        timings=timings | {"upload": time.perf_counter() - started},
        created_at=datetime.now(UTC).isoformat(),
    )
    if on_uploaded:
        on_uploaded()
    return commit_uploaded(manifest)


def commit_uploaded(manifest: Manifest) -> Manifest:
    """Commit files that lie at `manifest.files_uri`; returns the manifest that stands there in the end, as `commit`."""
    try:
        # Written last: readers trust a directory only once this object exists.
        storage.create_exclusive(f"{manifest.uri}/manifest.json", manifest.model_dump_json(indent=1).encode())
    except FileExistsError:
        winner = read_manifest(manifest.uri)
        assert winner is not None
        if winner.attempt != manifest.attempt:
            require_same_job(winner, manifest.job, manifest.job_digest)
            logger.info("%s was committed by another writer first; adopting attempt %s", manifest.uri, winner.attempt)
        return winner
    return manifest


def new_attempt() -> str:
    """A fresh name for the prefix of one writer's files."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"


def require_same_job(manifest: Manifest, job: dict[str, JsonValue], job_digest: str) -> None:
    """Raise ArtifactError naming the differing fields when a committed artifact was made by another job."""
    # Imported here: differences are told in terms of jobs and manifests, which are built on this module.
    from forge_core.differences import field_differences

    if manifest.job_digest == job_digest:
        return
    fields = ", ".join(map(str, field_differences(manifest.job, job)))
    raise ArtifactError(
        f"{manifest.uri} was committed by a different job; differing: {fields or 'the versions of the software'}. "
        "Use a new run_id, or restore the settings this run was started with"
    )


def _upload(local: Path, uri: str, num_bytes: int) -> None:
    """Upload one file and ask the store for its size: a store may take half an upload, or none, and say that it has it.

    Raises ArtifactError when it still has another size after some attempts.
    """
    stored = None
    for _ in range(UPLOAD_ATTEMPTS):
        storage.upload(local, uri)
        stored = storage.size(uri)
        if stored == num_bytes:
            return
        logger.warning("%s has %s bytes after an upload of %d, uploading again", uri, stored, num_bytes)
    raise ArtifactError(f"{uri} has {stored} bytes after {UPLOAD_ATTEMPTS} uploads of {num_bytes}; check the store")


def _records(directory: Path) -> Iterable[FileRecord]:
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        yield FileRecord(path=name, num_bytes=path.stat().st_size, sha256=storage.sha256_file(path))


def _verify(manifest: Manifest, directory: Path) -> None:
    for record in manifest.files:
        path = directory / record.path
        uri = f"{manifest.files_uri}/{record.path}"
        if not path.is_file():
            raise ArtifactError(f"{uri} is missing although its manifest promises it")
        if path.stat().st_size != record.num_bytes or storage.sha256_file(path) != record.sha256:
            raise ArtifactError(f"{uri} does not have the SHA-256 its manifest promises; the object is damaged")
