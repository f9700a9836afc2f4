"""Where a secret that was planted in the environment has got to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from forge_core import storage
from forge_core.listing import list_objects


def found_in(secret: str, *, places: Iterable[Path], root: str) -> list[str]:
    """Files under these directories, and objects under a root, that hold the secret; databases are read as bytes."""
    word = secret.encode()
    files = (path for place in places for path in sorted(place.rglob("*")) if path.is_file())
    held = [str(path) for path in files if word in path.read_bytes()]
    objects = (f"{root}/{stored.path}" for stored in list_objects(root))
    return held + [uri for uri in objects if word in storage.read_bytes(uri)]
