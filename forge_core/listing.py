"""What lies below a prefix, with sizes and times, and how to delete it: for retention and garbage collection."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import cast

from forge_core import storage


@dataclass(frozen=True)
class StoredObject:
    """One object; `path` is relative to the prefix that was listed."""

    path: str
    num_bytes: int
    modified: float  # seconds since the epoch, by the store's clock


def list_objects(uri: str) -> list[StoredObject]:
    """Every object below a prefix at any depth, sorted by path; empty when there is no such prefix."""
    local = storage.local_path(uri)
    if local is not None:
        return sorted(_local_objects(local), key=lambda found: found.path)
    fs, prefix = storage.filesystem(uri)
    fs.invalidate_cache()
    try:
        entries = cast(dict[str, dict], fs.find(prefix, detail=True))
    except FileNotFoundError:
        return []
    below = prefix.rstrip("/") + "/"
    found = [
        StoredObject(name.removeprefix(below), entry["size"], _modified(entry))
        for name, entry in entries.items()
        if entry["type"] == "file" and name.startswith(below) and not name.endswith("/")
    ]
    return sorted(found, key=lambda stored: stored.path)


def delete_object(uri: str) -> None:
    """Delete one object; one that is gone already is no error."""
    fs, path = storage.filesystem(uri)
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


def delete_below(uri: str) -> None:
    """Delete every object below a prefix; what is gone already is no error.

    One request for each object: s3fs does not report what a bulk deletion has refused.
    """
    local = storage.local_path(uri)
    if local is not None:
        while local.exists():  # somebody else may delete the same tree
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(local)
        return
    for found in list_objects(uri):
        delete_object(f"{uri}/{found.path}")


def _local_objects(directory: Path) -> list[StoredObject]:
    # Not fsspec's find: it drops a whole directory without a word when one file vanishes while it looks.
    found = []
    for parent, _, names in os.walk(directory, onerror=_raise_unless_gone):
        for path in (Path(parent) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                name = path.relative_to(directory).as_posix()
                found.append(StoredObject(name, status.st_size, status.st_mtime))
    return found


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _modified(entry: dict) -> float:
    # S3 says LastModified; memory:// has only the time of creation, which every write renews.
    value = entry.get("LastModified", entry.get("created"))
    return value.timestamp() if isinstance(value, datetime) else float(value)
