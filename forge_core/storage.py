"""Bytes in and out of any fsspec URI, and the one primitive that commits rest on: create-only writes.

Local paths, `file://`, `memory://`, `s3://` and every other fsspec protocol work alike. Credentials come from the
environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, ...), never from a URI.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
import time
from pathlib import Path

import fsspec
from fsspec.spec import AbstractFileSystem

from forge_core.faults import struck

_CREATE_CONFLICT_ATTEMPTS = 8


class StorageUnavailableError(OSError):
    """The store did not answer, or not with success, for longer than is waited for."""


def absolute_uri(uri: str | Path) -> str:
    """The URI with a protocol; a bare path becomes an absolute `file://` URI.

    Raises ValueError for a URI that carries credentials: it would end up in logs, manifests and MLflow.
    """
    text = str(uri).rstrip("/")
    if re.match(r"^[a-z0-9+]+://[^/]*:[^/]*@", text):
        raise ValueError(
            "root holds credentials (user:secret@...); put them in the environment (AWS_ACCESS_KEY_ID, ...)"
        )
    if "://" in text:
        return text
    return Path(text).expanduser().absolute().as_uri()


def filesystem(uri: str) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a URI and the path in it.

    Listing caches are off: s3fs never expires them, so a reader would not see what another process has written.
    """
    uri = absolute_uri(uri)
    if uri.startswith("s3://"):
        return fsspec.core.url_to_fs(uri, use_listings_cache=False)
    return fsspec.core.url_to_fs(uri)


def local_path(uri: str) -> Path | None:
    """The directory or file behind a `file://` URI, None for every other store."""
    fs, path = filesystem(uri)
    return Path(path) if "file" in _protocols(fs) else None


def read_bytes(uri: str) -> bytes:
    """The content of an object; raises FileNotFoundError when it does not exist."""
    struck("read", uri)
    fs, path = filesystem(uri)
    content = fs.cat_file(path)
    assert isinstance(content, bytes)
    return content


def exists(uri: str) -> bool:
    """Whether an object exists (asked of the object itself, not of a listing)."""
    fs, path = filesystem(uri)
    return fs.exists(path)


def list_names(uri: str) -> list[str]:
    """Names directly under a prefix, sorted; empty when there is no such prefix."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    try:
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False))
    except FileNotFoundError:
        return []


def write_atomic(uri: str, data: bytes) -> None:
    """Replace an object so that a reader sees the old content or the new, never a mixture."""
    fs, path = filesystem(uri)
    if "file" not in _protocols(fs):
        fs.pipe_file(path, data)
        return
    pending = _write_pending(Path(path), data)
    os.replace(pending, path)


def create_exclusive(uri: str, data: bytes) -> None:
    """Write an object that must not exist yet; raises FileExistsError when it does. One of many writers wins."""
    struck("create", uri)
    fs, path = filesystem(uri)
    if "file" in _protocols(fs):
        pending = _write_pending(Path(path), data)
        try:
            # A hard link is atomic and fails when the name is taken; an exclusive open could leave half a file behind.
            os.link(pending, path)
        finally:
            pending.unlink()
        return
    for attempt in range(_CREATE_CONFLICT_ATTEMPTS):
        try:
            fs.pipe_file(path, data, mode="create")
            return
        except FileExistsError:
            raise
        except OSError as error:
            code = _s3_error_code(error)
            if code == "PreconditionFailed":
                raise FileExistsError(uri) from error
            if code != "ConditionalRequestConflict" or attempt == _CREATE_CONFLICT_ATTEMPTS - 1:
                raise
            time.sleep(0.05 * 2**attempt)  # another writer is in the middle of its own create: ask again who won


def require_exclusive_create(root: str, *, single_writer: bool = False) -> None:
    """Refuse a store that ignores create-only writes, unless the caller vouches to be its only writer.

    Some S3 servers accept the condition and overwrite in silence, which would let two writers both "win" a commit.
    """
    probe = f"{absolute_uri(root)}/.probe-{secrets.token_hex(8)}"
    try:
        create_exclusive(probe, b"first")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"root is {root}, which cannot be written: {error}; check the path, endpoint and credentials"
        ) from error
    try:
        create_exclusive(probe, b"second")
        is_exclusive = False
    except FileExistsError:
        is_exclusive = True
    finally:
        fs, path = filesystem(probe)
        fs.rm_file(path)
    if not is_exclusive and not single_writer:
        raise ValueError(
            f"root is {root}, a store that overwrites on create-only writes (If-None-Match is ignored); use a store "
            "that honours them, or set single_writer=true if nothing else ever writes there"
        )


def upload(local: Path, uri: str) -> None:
    """Copy one local file to an object."""
    outcome = struck("upload", uri)
    if outcome == "lose":
        return
    fs, path = filesystem(uri)
    if "file" in _protocols(fs):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    fs.put_file(str(local), path)
    if outcome == "tear":
        fs.pipe_file(path, local.read_bytes()[: local.stat().st_size // 2])


def download(uri: str, local: Path) -> None:
    """Copy one object to a local file."""
    struck("download", uri)
    fs, path = filesystem(uri)
    local.parent.mkdir(parents=True, exist_ok=True)
    fs.get_file(path, str(local))


def copy(source: str, uri: str) -> None:
    """Copy one object to another URI; within one store the bytes do not come here."""
    (source_fs, source_path), (fs, path) = filesystem(source), filesystem(uri)
    if "file" in _protocols(fs):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    if source_fs is fs:
        fs.cp_file(source_path, path)
        return
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory) / "object"
        download(source, local)
        upload(local, uri)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_pending(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with pending.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return pending


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _s3_error_code(error: OSError) -> str | None:
    # s3fs translates some 412 answers to OSError(EINVAL) and keeps the server's own answer only as the cause.
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code")
