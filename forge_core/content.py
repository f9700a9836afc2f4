"""What a place holds, as one digest: for settings that name weights, which may change while the name stays."""

from __future__ import annotations

import functools
from pathlib import Path

from forge_core import storage
from forge_core.artifacts import read_manifest, sha256_json
from forge_core.policy_uri import HF_URI


def content_digest(uri: str) -> str:
    """Digest of an artifact, of the files in a local directory, or of a pinned name on the hub.

    Raises ValueError for a place that is none of these.
    """
    if hub := HF_URI.match(uri):
        if hub["revision"] is None:
            raise ValueError(f"weights is {uri}, which may change; pin it as hf://org/name@revision")
        return sha256_json(uri)
    manifest = read_manifest(storage.absolute_uri(uri))
    if manifest is not None:
        return manifest.digest
    directory = Path(uri)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"weights is {uri}, which is no artifact, no local directory with a config.json and not of the form "
            "hf://org/name@revision"
        )
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return sha256_json([[path.name, _sha256(path, path.stat().st_size, path.stat().st_mtime_ns)] for path in files])


@functools.lru_cache(maxsize=1024)
def _sha256(path: Path, _size: int, _changed: int) -> str:
    """SHA-256 of a file, read again only when it has another size or time: every job of a run asks for it."""
    return storage.sha256_file(path)
