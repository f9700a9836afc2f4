"""What an artifact was made from, and what was made from it: a graph of manifests, by digest."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field, JsonValue

from forge_core import storage
from forge_core.artifacts import ArtifactError, Kind, Manifest, Ref
from forge_core.jobs import StageJob
from forge_core.manifests import ManifestReader, artifact_uris, short_name
from forge_core.settings import Settings

# Where a job names the function that its `source_sha256` belongs to; `score` names its functions itself.
_FUNCTIONS = {"dataset": ("dataset",), "update": ("loss",), "evaluate": ("evaluation", "reward")}


class Node(Settings):
    """An artifact: what made it, from what, and how."""

    kind: Kind
    uri: str
    stage: str = ""
    inputs: dict[str, Ref] = Field(default_factory=dict)
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="The job, without what stands beside it")
    source_sha256: dict[str, str] = Field(default_factory=dict, description="By function")
    software: dict[str, str] = Field(default_factory=dict)
    seed: int | None = None
    created_at: str = ""
    summary: dict[str, float | int] = Field(default_factory=dict)
    reused_from: Ref | None = None
    copies: tuple[str, ...] = Field((), description="Other URIs at which the same digest stands")
    problem: str | None = Field(None, description="Why nothing more is known: the manifest is missing, damaged, other")

    def ref(self, digest: str) -> Ref:
        return Ref(kind=self.kind, uri=self.uri, digest=digest)


class Lineage(Settings):
    """The artifacts that one was made from, nearest first, or those that were made from it; itself first."""

    artifact: Ref
    nodes: dict[str, Node] = Field(description="By digest")
    problems: tuple[str, ...] = Field((), description="Why there may be more than these")


def upstream(ref: Ref) -> Lineage:
    """Everything an artifact was made from, directly or through others."""
    return Lineage(artifact=ref, nodes=_walk([ref], ManifestReader(), {}))


def downstream(root: str, ref: Ref) -> Lineage:
    """Everything in a run, or in all runs under a root, that was made from an artifact, directly or through others."""
    root = storage.absolute_uri(root)
    stored = scan(root)
    nodes, problems = stored.nodes, list(stored.problems)
    found = stored.descendants([ref.digest])
    for digest, node in nodes.items():
        if node.problem is None or digest == ref.digest:
            continue
        depend = stored.descendants([digest])
        unknown = [short_name(nodes[other].uri, root) for other in nodes if other in depend and other not in found]
        if unknown:
            problems.append(
                f"{short_name(node.uri, root)} is {node.problem}; made from it, and so perhaps from this one: "
                f"{', '.join(unknown[:3])}{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}"
            )
    itself = nodes.get(ref.digest) or _walk([ref], ManifestReader(), {})[ref.digest]
    chosen = {ref.digest: itself} | {digest: nodes[digest] for digest in nodes if digest in found}
    return Lineage(artifact=ref, nodes=chosen, problems=tuple(problems))


@dataclass(frozen=True)
class Scan:
    """All artifacts of a run or root with what they were made from elsewhere, and what could not be read."""

    nodes: dict[str, Node]  # by digest
    reader: ManifestReader
    problems: list[str]

    @functools.cached_property
    def users(self) -> dict[str, list[Ref]]:
        """What was made directly from each digest."""
        found: dict[str, list[Ref]] = {}
        for digest, node in self.nodes.items():
            for ref in node.inputs.values():
                found.setdefault(ref.digest, []).append(node.ref(digest))
        return found

    def descendants(self, origins: Iterable[str]) -> set[str]:
        """Digests of what was made from these, directly or through others; an origin only if made from another one."""
        found: set[str] = set()
        waiting = list(origins)
        while waiting:
            following = [user.digest for user in self.users.get(waiting.pop(), []) if user.digest not in found]
            found.update(following)
            waiting += following
        return found


def scan(place: str) -> Scan:
    """Read all manifests of a run, or of all runs under a root."""
    reader, nodes, problems, uncommitted = ManifestReader(), {}, [], []
    place = storage.absolute_uri(place)
    uris = artifact_uris(place)
    reader.read(uris)
    for uri in uris:
        match reader.get(uri):
            case None:
                uncommitted.append(short_name(uri, place))
            case ArtifactError() as error:
                problems.append(f"{short_name(uri, place)} is damaged: {error}")
            case manifest:
                _add(nodes, manifest)
    if uncommitted:
        problems.append(
            f"{len(uncommitted)} without a manifest, never committed or deleted: {', '.join(uncommitted[:3])}"
            f"{' ...' if len(uncommitted) > 3 else ''}"
        )
    elsewhere = [ref for node in nodes.values() for ref in node.inputs.values() if ref.digest not in nodes]
    return Scan(_walk(elsewhere, reader, nodes), reader, problems)


def _walk(refs: Iterable[Ref], reader: ManifestReader, nodes: dict[str, Node]) -> dict[str, Node]:
    """These nodes and, level by level, whatever the references lead to; a link that is broken is a node as well."""
    level, seen = list(refs), set()
    while level:
        reader.read_ahead(level)
        following: list[Ref] = []
        for ref in level:
            known = nodes.get(ref.digest)
            if (ref.uri, ref.digest) in seen or (known is not None and known.problem is None):
                continue
            seen.add((ref.uri, ref.digest))
            found = reader.resolve(ref)
            if isinstance(found, Manifest):
                nodes.pop(ref.digest, None)  # a broken link to it counts no longer
                _add(nodes, found)
                following += found.inputs.values()
            elif known is None:
                nodes[ref.digest] = Node(kind=ref.kind, uri=ref.uri, problem=found)
        level = following
    return nodes


def _add(nodes: dict[str, Node], manifest: Manifest) -> None:
    known = nodes.get(manifest.digest)
    if known is not None:
        nodes[manifest.digest] = known.model_copy(update={"copies": (*known.copies, manifest.uri)})
        return
    job = manifest.job
    apart = {"stage", "seed", "source_sha256", *StageJob.not_identity}
    seed = job.get("seed")
    nodes[manifest.digest] = Node(
        kind=manifest.kind,
        uri=manifest.uri,
        stage=str(job["stage"]),
        inputs=manifest.inputs,
        settings={
            name: value for name, value in job.items() if name not in apart and value is not None and not _is_ref(value)
        },
        source_sha256=_sources(job),
        software=manifest.software,
        seed=seed if isinstance(seed, int) else None,
        created_at=manifest.created_at,
        summary=manifest.summary,
        reused_from=manifest.reused_from,
    )


def _is_ref(value: JsonValue) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_ref, value))
    return isinstance(value, dict) and value.keys() == Ref.model_fields.keys()


def _sources(job: dict[str, JsonValue]) -> dict[str, str]:
    found = job.get("source_sha256")
    if isinstance(found, dict):
        return {name: str(value) for name, value in found.items()}
    function: JsonValue = job
    for name in _FUNCTIONS.get(str(job["stage"]), ()):
        function = function.get(name) if isinstance(function, dict) else None
    return {str(function["fn"]): str(found)} if found and isinstance(function, dict) else {}
