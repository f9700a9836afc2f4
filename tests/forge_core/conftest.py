"""Stores to test against: a local directory, memory, and a real S3 endpoint process."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture(params=["file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty prefix in each kind of store."""
    name = uuid.uuid4().hex
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    if request.param == "memory":
        return f"memory://{name}"
    return f"{request.getfixturevalue('moto_s3')}/{name}"


class OverwritingFileSystem(MemoryFileSystem):
    """A store like some S3 servers: it accepts a create-only write and overwrites all the same."""

    protocol = "overwriting"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        return super().pipe_file(path, value, mode="overwrite", **kwargs)


@pytest.fixture
def overwriting_root() -> str:
    fsspec.register_implementation("overwriting", OverwritingFileSystem, clobber=True)
    return f"overwriting://{uuid.uuid4().hex}"
