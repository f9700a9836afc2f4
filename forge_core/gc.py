"""Garbage collection: what no manifest promises.

    python -m forge_core.gc ROOT [--run RUN_ID] [--older-than-hours 24] [--delete]

Without `--delete` it only shows: files of attempts that lost a race or were abandoned, half-pruned artifacts, pending
files of atomic writes, probes, expired holds and incomplete multipart uploads. A live writer looks like an abandoned
one, so nothing younger than the limit counts, by the newest object of an attempt. Manifests, pointers, records and the
files of committed attempts are never touched, and what is not known is left alone.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from forge_core import listing, storage
from forge_core.artifacts import ArtifactError, read_manifest
from forge_core.holds import has_ended
from forge_core.listing import StoredObject
from forge_core.manifests import FOLDERS, ManifestReader
from forge_core.multipart import Upload, abort_upload, incomplete_uploads
from forge_core.retention import ABANDONED_SECONDS, needed_digests

_ARTIFACT = rf"(?P<artifact>[^/]+/(?:(?:{'|'.join(FOLDERS)})|evals/[^/]+)/[^/]+)"
_ATTEMPT = re.compile(rf"{_ARTIFACT}/(?P<attempt>\d{{8}}T\d{{6}}-[0-9a-f]{{8}})/.+")
_RECORD = re.compile(
    rf"{_ARTIFACT}/(manifest|pruned)\.json|published/[^/]+/(current|nightly|v\d{{4,}})\.json|[^/]+/run\.json|[^/]+/drill/.+"
)
_HOLD = re.compile(r"holds/[^/]+/[^/]+\.json")
_PENDING = re.compile(r"(.*/)?\.[^/]+\.[0-9a-f]{8}")  # local atomic writes rename or link such a file
_PROBE = re.compile(r"\.probe-[0-9a-f]+")

ABANDONED, LOST, HALF_PRUNED, UNKNOWN = "abandoned attempt", "attempt that lost", "half-pruned", "unknown"


@dataclass(frozen=True)
class Finding:
    """Something that no manifest promises: a prefix, an object, or an upload that never became one."""

    what: str
    uri: str
    num_bytes: int
    modified: float  # of its newest object, seconds since the epoch
    upload: Upload | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is garbage for certain, but for its age."""
        return not self.what.startswith(UNKNOWN)


def find_garbage(root: str, *, run_id: str | None = None) -> list[Finding]:
    """All that is promised by nothing in a root, or in one of its runs, whatever its age.

    Raises ValueError when there is nothing at all: that is a misspelt root.
    """
    root = storage.absolute_uri(root)
    below = f"{run_id}/" if run_id else ""
    place = f"{root}/{below}".rstrip("/")
    objects = [
        StoredObject(below + found.path, found.num_bytes, found.modified) for found in listing.list_objects(place)
    ]
    uploads = [
        Finding("incomplete upload", upload.uri, upload.num_bytes, upload.started, upload)
        for upload in incomplete_uploads(place)
    ]
    if not objects and not uploads:
        raise ValueError(f"{place} holds nothing; check the path and the credentials")
    return [*_attempts(root, objects), *_single_objects(root, objects), *uploads]


def collect(found: Finding) -> bool:
    """Delete it; False when it turned out to be needed after all."""
    if found.upload is not None:
        abort_upload(found.upload)
    elif found.what in (ABANDONED, LOST):
        uri, _, attempt = found.uri.rpartition("/")
        manifest = read_manifest(uri)
        if manifest is not None and manifest.attempt == attempt:
            return False  # its writer was alive, and has committed since
        listing.delete_below(found.uri)
    elif found.what == HALF_PRUNED:
        listing.delete_below(found.uri)
    else:
        listing.delete_object(found.uri)
    return True


def _attempts(root: str, objects: list[StoredObject]) -> Iterator[Finding]:
    """The attempts that their artifact's manifest does not name, or names although the artifact is pruned."""
    attempts: dict[tuple[str, str], list[StoredObject]] = {}
    marks = {}
    for found in objects:
        if place := _ATTEMPT.fullmatch(found.path):
            attempts.setdefault((f"{root}/{place['artifact']}", place["attempt"]), []).append(found)
        elif found.path.endswith("/pruned.json"):
            marks[f"{root}/{found.path}".removesuffix("/pruned.json")] = found
    manifests = ManifestReader()
    manifests.read(uri for uri, _ in attempts)
    needed = needed_digests(root) if marks else {}
    for (uri, attempt), files in attempts.items():
        manifest, prefix = manifests.get(uri), f"{uri}/{attempt}"
        if isinstance(manifest, ArtifactError):
            yield _finding(f"{UNKNOWN}, its manifest cannot be read", prefix, files)
        elif manifest is None:
            yield _finding(ABANDONED, prefix, files)
        elif manifest.attempt != attempt:
            yield _finding(LOST, prefix, files)
        elif uri in marks and manifest.digest not in needed:
            # Aged by its mark, the newest object: the files alone are older, and their pruner may be alive.
            whole = _finding(HALF_PRUNED, prefix, [*files, marks[uri]])
            yield Finding(HALF_PRUNED, prefix, sum(file.num_bytes for file in files), whole.modified)


def _single_objects(root: str, objects: list[StoredObject]) -> Iterator[Finding]:
    """What lies outside of attempts; unknown objects by directory."""
    unknown: dict[str, list[StoredObject]] = {}
    now = datetime.now(UTC)
    for found in objects:
        uri = f"{root}/{found.path}"
        if _ATTEMPT.fullmatch(found.path) or _RECORD.fullmatch(found.path):
            continue
        if _PROBE.fullmatch(found.path):
            yield _finding("probe", uri, [found])
        elif _PENDING.fullmatch(found.path):
            yield _finding("pending file", uri, [found])
        elif not _HOLD.fullmatch(found.path):
            unknown.setdefault(uri.rpartition("/")[0] if "/" in found.path else uri, []).append(found)
        elif has_ended(uri, now):
            yield _finding("expired hold", uri, [found])
    for place, files in unknown.items():
        yield _finding(UNKNOWN, place, files)


def _finding(what: str, uri: str, objects: list[StoredObject]) -> Finding:
    return Finding(what, uri, sum(found.num_bytes for found in objects), max(found.modified for found in objects))


def report(root: str, *, run_id: str | None, older_than_hours: float, delete: bool) -> Iterator[str]:
    """One line for each finding as it is dealt with, then the total."""
    num_bytes = count = num_young = 0
    for found in find_garbage(root, run_id=run_id):
        seconds = time.time() - found.modified
        limit = older_than_hours * 3600
        line = f"{found.what:18} {seconds / 3600:9.1f} h {found.num_bytes / 1e6:12.3f} MB  {found.uri}"
        if not found.is_known:
            yield f"{line}  left alone"
        elif seconds < (max(limit, ABANDONED_SECONDS) if found.what == HALF_PRUNED else limit):
            num_young += 1
        elif delete and not collect(found):
            yield f"{line}  committed meanwhile, left alone"
        else:
            count, num_bytes = count + 1, num_bytes + found.num_bytes
            yield line
    yield f"{count} things, {num_bytes / 1e6:.3f} MB; {num_young} more are younger than {older_than_hours:g} h"
    yield "deleted" if delete else "nothing was deleted; add --delete"


def main() -> None:
    """Command line: show or delete garbage."""
    parser = argparse.ArgumentParser(prog="python -m forge_core.gc", description="Show or delete garbage in a root.")
    parser.add_argument("root", help="where artifacts live: a directory or any fsspec URI")
    parser.add_argument("--run", help="look at this run alone")
    parser.add_argument("--older-than-hours", type=float, default=24, help="age of the newest object of a thing")
    parser.add_argument("--delete", action="store_true", help="delete what is shown")
    arguments = parser.parse_args()
    try:
        for line in report(
            arguments.root,
            run_id=arguments.run,
            older_than_hours=arguments.older_than_hours,
            delete=arguments.delete,
        ):
            sys.stdout.write(f"{line}\n")
    except (ArtifactError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
