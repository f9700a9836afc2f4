"""Many manifests at once: found by URI, read in parallel, and never trusted to be there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from fsspec.spec import AbstractFileSystem
from pydantic import ValidationError

from forge_core import storage
from forge_core.artifacts import ArtifactError, Manifest, Ref, read_manifest
from forge_core.listing import list_objects
from forge_core.publication import Publication

NUM_THREADS = 16  # reading is waiting for the store

Place = tuple[AbstractFileSystem, str]

# Where the artifacts of a run lie, {run}/{folder}/...; evaluations lie in {run}/evals/{version}/... .
FOLDERS = (
    "datasets",
    "policies",
    "rollouts",
    "rollout_shards",
    "reference_logprobs",
    "scored",
    "train_states",
    "quantized",
    "overlaps",
    "reward_models",
)
_ARTIFACT = re.compile(rf"(?P<name>([^/]+/)?(({'|'.join(FOLDERS)})/|evals/[^/]+/)[^/]+)/.")
_PLACE = re.compile(rf"(?P<run>.+)/(?P<name>({'|'.join(FOLDERS)}|evals)/.+)")
_VERSION = re.compile(r"(?P<run>.+)/(?:policies|rollouts|scored)/v(?P<version>\d{4,})")


class ManifestReader:
    """Manifests by reference, each read once."""

    def __init__(self) -> None:
        self._found: dict[str, Manifest | ArtifactError | None] = {}

    def read(self, uris: Iterable[str]) -> None:
        """Read these manifests in parallel, unless they have been read already."""
        missing = list(dict.fromkeys(uri for uri in uris if uri not in self._found))
        # Found in this thread: fsspec opens a client for each thread that asks, 0.3 s apiece on S3.
        places = [storage.filesystem(f"{uri}/manifest.json") for uri in missing]
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for uri, content in zip(missing, pool.map(_fetch, places), strict=True):
                self._found[uri] = _parse(uri, content)

    def read_ahead(self, refs: Iterable[Ref]) -> None:
        """Read the manifests of these references, and of what they were probably made from.

        Versions count up within a run. The guess hides the latency of walking a long run link by link; nothing else
        depends on it.
        """
        uris = [ref.uri for ref in refs if ref.uri not in self._found]
        self.read([*uris, *(earlier for uri in uris for earlier in _earlier_versions(uri))])

    def get(self, uri: str) -> Manifest | ArtifactError | None:
        """The manifest that stands at a URI; None when there is none, the error when it cannot be read."""
        self.read([uri])
        return self._found[uri]

    def resolve(self, ref: Ref) -> Manifest | str:
        """The manifest behind a reference, or what is wrong with it."""
        match self.get(ref.uri):
            case None:
                return f"missing, was digest {ref.digest}"
            case ArtifactError() as error:
                return f"damaged, was digest {ref.digest}: {str(error).splitlines()[0]}"
            case Manifest(digest=digest) if digest != ref.digest:
                return f"replaced by digest {digest}, was digest {ref.digest}"
            case manifest:
                return manifest


def find(uri: str) -> Ref:
    """The artifact that a URI stands for: itself, the policy of a published name, or the newest policy of a run."""
    uri = storage.absolute_uri(uri)
    if (manifest := read_manifest(uri)) is not None:
        return manifest.ref
    if storage.exists(f"{uri}/current.json"):
        return Publication.model_validate_json(storage.read_bytes(f"{uri}/current.json")).policy
    for name in reversed(storage.list_names(f"{uri}/policies")):
        if (manifest := read_manifest(f"{uri}/policies/{name}")) is not None:
            return manifest.ref
    raise ArtifactError(
        f"{uri} is no artifact, no published name and no run with a policy; give {{root}}/{{run_id}}, "
        "{root}/{run_id}/policies/v0003 or {root}/published/{name}"
    )


def file_reader(manifest: Manifest, name: str) -> Callable[[], bytes]:
    """Reads one file of an artifact, in any thread; raises ArtifactError when it is not what the manifest promises."""
    uri = f"{manifest.files_uri}/{name}"
    place = storage.filesystem(uri)
    promised = [record.sha256 for record in manifest.files if record.path == name]

    def read() -> bytes:
        content = _fetch(place)
        if content is None:
            raise ArtifactError(f"{uri} is missing: it was pruned or lost")
        if promised != [hashlib.sha256(content).hexdigest()]:
            raise ArtifactError(f"{uri} does not have the SHA-256 its manifest promises; the object is damaged")
        return content

    return read


def run_of(uri: str) -> str:
    """Prefix of the run that an artifact lies in."""
    place = _PLACE.fullmatch(uri)
    return place["run"] if place else uri.rpartition("/")[0]


def root_of(uri: str) -> str:
    """Root of the run that an artifact lies in."""
    return run_of(uri).rpartition("/")[0]


def short_name(uri: str, place: str = "") -> str:
    """An artifact's URI as people say it: relative to `place` when it lies there, whole otherwise."""
    return uri.removeprefix(f"{place}/") if place else uri.removeprefix(f"{run_of(uri)}/")


def artifact_uris(place: str) -> list[str]:
    """URIs of all artifacts, committed or not, of a run or of all runs under a root, sorted."""
    place = storage.absolute_uri(place)
    found = [_ARTIFACT.match(stored.path) for stored in list_objects(place)]
    return [f"{place}/{name}" for name in sorted({match["name"] for match in found if match})]


def _fetch(place: Place) -> bytes | None:
    fs, path = place
    try:
        content = fs.cat_file(path)
    except FileNotFoundError:
        return None
    assert isinstance(content, bytes)
    return content


def _parse(uri: str, content: bytes | None) -> Manifest | ArtifactError | None:
    try:
        return None if content is None else Manifest.model_validate_json(content)
    except ValidationError as error:
        return ArtifactError(f"{uri}/manifest.json is not a manifest: {error.error_count()} fields are wrong")


def _earlier_versions(uri: str) -> list[str]:
    place = _VERSION.fullmatch(uri)
    if place is None:
        return []
    versions = range(int(place["version"]), -1, -1)
    return [
        f"{place['run']}/{kind}/v{version:04d}" for version in versions for kind in ("policies", "scored", "rollouts")
    ]
