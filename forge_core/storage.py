"""Bytes in and out of any fsspec URI, and the one primitive that commits rest on: create-only writes.

Local paths, `file://`, `memory://`, `s3://` and every other fsspec protocol work alike. Credentials come from the
environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, ...), never from a URI.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import fsspec
from fsspec.spec import AbstractFileSystem

from forge_core.credentials import REMEDY, has_credentials
from forge_core.faults import struck
from forge_core.storage_errors import naming_full_disk, persist, server_code

PART_BYTES = 50 * 2**20  # of an upload in parts: files of twice that size and more; S3 wants 5 MiB or more
_MAX_PARTS = 10_000
_PART_SENDS = 3  # one part that fails must not cost the whole file

T = TypeVar("T")


def absolute_uri(uri: str | Path) -> str:
    """The URI with a protocol; a bare path becomes an absolute `file://` URI.

    Raises ValueError for a URI that carries credentials: it would end up in logs, manifests and MLflow.
    """
    text = str(uri).rstrip("/")
    if has_credentials(text):
        raise ValueError(f"a URI holds credentials (user:secret@...); {REMEDY}")
    if "://" in text:
        return text
    return Path(text).expanduser().absolute().as_uri()


def filesystem(uri: str, *, sends: int | None = None) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a URI and the path in it.

    Listing caches are off: s3fs never expires them, so a reader would not see what another process has written. An S3
    request that fails is sent `sends` times; None leaves that to s3fs and botocore, whose retries multiply (25 times).
    """
    uri = absolute_uri(uri)
    if not uri.startswith("s3://"):
        return fsspec.core.url_to_fs(uri)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if "@" in os.environ.get(name, ""):
            raise ValueError(f"{name} holds credentials (user:secret@...); put them in AWS_ACCESS_KEY_ID, ...")
    if sends is None:
        return fsspec.core.url_to_fs(uri, use_listings_cache=False)
    retries = {"retries": {"total_max_attempts": sends}}
    fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False, config_kwargs=retries)
    fs.retries = 1  # s3fs has a loop of its own around botocore's
    return fs, path


def local_path(uri: str) -> Path | None:
    """The directory or file behind a `file://` URI, None for every other store."""
    fs, path = filesystem(uri)
    return Path(path) if "file" in _protocols(fs) else None


def read_bytes(uri: str) -> bytes:
    """The content of an object; raises FileNotFoundError when it does not exist."""

    def read(fs: AbstractFileSystem, path: str) -> bytes:
        struck("read", uri)
        content = fs.cat_file(path)
        assert isinstance(content, bytes)
        return content

    return _operate("read", uri, read)


def exists(uri: str) -> bool:
    """Whether an object exists (asked of the object itself, not of a listing)."""
    return _operate("read", uri, lambda fs, path: _ask(fs, path, fs.exists))


def size(uri: str) -> int | None:
    """Bytes of an object (asked of the object itself), None when it does not exist."""

    def measure(fs: AbstractFileSystem, path: str) -> int | None:
        try:
            return int(_ask(fs, path, fs.info)["size"])
        except FileNotFoundError:
            return None

    return _operate("read", uri, measure)


def list_names(uri: str) -> list[str]:
    """Names directly under a prefix, sorted; empty when there is no such prefix."""

    def names(fs: AbstractFileSystem, path: str) -> list[str]:
        fs.invalidate_cache()
        try:
            return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False))
        except FileNotFoundError:
            return []

    return _operate("list", uri, names)


def write_atomic(uri: str, data: bytes) -> None:
    """Replace an object so that a reader sees the old content or the new, never a mixture."""

    def write(fs: AbstractFileSystem, path: str) -> None:
        if "file" not in _protocols(fs):
            fs.pipe_file(path, data)
            return
        pending = _write_pending(Path(path), data)
        os.replace(pending, path)

    _operate("write", uri, write)


def create_exclusive(uri: str, data: bytes) -> None:
    """Write an object that must not exist yet; raises FileExistsError when it does. One of many writers wins.

    An object with these very bytes counts as this writer's own, so `data` must hold something that no other writer has.
    """

    def create(fs: AbstractFileSystem, path: str) -> None:
        struck("create", uri)
        try:
            _create_once(fs, path, data)
        except OSError as error:
            is_taken = isinstance(error, FileExistsError) or server_code(error) == "PreconditionFailed"
            if not is_taken:
                raise
            # A request whose answer was lost may have been the one that won. aiohttp by itself repeats a PUT on a
            # connection that broke, so this may be the first answer seen here.
            if not _holds(fs, path, data):
                raise FileExistsError(uri) from error

    _operate("create", uri, create)


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
        _operate("delete", probe, lambda fs, path: fs.rm_file(path))
    if not is_exclusive and not single_writer:
        raise ValueError(
            f"root is {root}, a store that overwrites on create-only writes (If-None-Match is ignored); use a store "
            "that honours them, or set single_writer=true if nothing else ever writes there"
        )


def upload(local: Path, uri: str) -> None:
    """Copy one local file to an object."""
    num_bytes = local.stat().st_size

    def put(fs: AbstractFileSystem, path: str) -> None:
        outcome = struck("upload", uri)
        if outcome == "lose":
            return
        if "s3" in _protocols(fs):
            fs.put_file(str(local), path, chunksize=max(PART_BYTES, math.ceil(num_bytes / _MAX_PARTS)))
        elif "file" in _protocols(fs):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with naming_full_disk(Path(path)):
                fs.put_file(str(local), path)
        else:
            fs.put_file(str(local), path)
        if outcome == "tear":
            fs.pipe_file(path, local.read_bytes()[: num_bytes // 2])

    _operate("upload", uri, put, sends=_PART_SENDS if num_bytes >= 2 * PART_BYTES else 1)


def download(uri: str, local: Path) -> None:
    """Copy one object to a local file."""

    def get(fs: AbstractFileSystem, path: str) -> None:
        struck("download", uri)
        local.parent.mkdir(parents=True, exist_ok=True)
        with naming_full_disk(local):
            fs.get_file(path, str(local))

    _operate("download", uri, get)


def copy(source: str, uri: str) -> None:
    """Copy one object to another URI; within one store the bytes do not come here."""
    source_fs, source_path = filesystem(source)
    if source_fs is filesystem(uri)[0]:

        def duplicate(fs: AbstractFileSystem, path: str) -> None:
            if "file" in _protocols(fs):
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            fs.cp_file(source_path, path)

        _operate("copy", uri, duplicate)
        return
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory) / "object"
        download(source, local)
        upload(local, uri)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _operate(operation: str, uri: str, call: Callable[[AbstractFileSystem, str], T], *, sends: int = 1) -> T:
    """The result of `call(filesystem, path)`, tried again while the store is unavailable."""
    return persist(
        operation, uri, lambda: call(*filesystem(uri, sends=sends)), on_expired=lambda: _forget_credentials(uri)
    )


def _ask(fs: AbstractFileSystem, path: str, question: Callable[[str], T]) -> T:
    """The answer to a question about an object."""
    try:
        return question(path)
    except OSError as error:
        if server_code(error) in ("400", "403"):
            fs.cat_file(path, start=0, end=1)  # the answer to a HEAD has no body to say why; the answer to this has
        raise


def _holds(fs: AbstractFileSystem, path: str, data: bytes) -> bool:
    try:
        return fs.cat_file(path) == data
    except FileNotFoundError:  # its writer has withdrawn it meanwhile
        return False


def _forget_credentials(uri: str) -> None:
    """Let the next attempt read the credentials anew: s3fs keeps them as long as a filesystem object lives."""
    fs, _ = filesystem(uri)
    type(fs).clear_instance_cache()


def _create_once(fs: AbstractFileSystem, path: str, data: bytes) -> None:
    if "file" not in _protocols(fs):
        fs.pipe_file(path, data, mode="create")
        return
    pending = _write_pending(Path(path), data)
    try:
        # A hard link is atomic and fails when the name is taken; an exclusive open could leave half a file behind.
        os.link(pending, path)
    finally:
        pending.unlink()


def _write_pending(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pending = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with naming_full_disk(pending), pending.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return pending


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
