"""What an artifact was made from, and what was made from it: a graph of manifests, by digest."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pydantic import Field, JsonValue

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
    nodes, problems = scan(root)
    names = {digest: short_name(node.uri, root) for digest, node in nodes.items()}
    users = users_of(nodes)
    found = descendants(users, [ref.digest])
    for digest, node in nodes.items():
        if node.problem is None or digest == ref.digest:
            continue
        depend = descendants(users, [digest])
        if unknown := [names[other] for other in nodes if other in depend and other not in found]:
            problems.append(
                f"{names[digest]} is {node.problem}; made from it, and so perhaps from this one: "
                f"{', '.join(unknown[:3])}{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}"
            )
    itself = nodes.get(ref.digest) or next(iter(_walk([ref], ManifestReader(), {}).values()))
    chosen = {ref.digest: itself} | {digest: nodes[digest] for digest in nodes if digest in found}
    return Lineage(artifact=ref, nodes=chosen, problems=tuple(problems))


def scan(place: str) -> tuple[dict[str, Node], list[str]]:
    """All artifacts of a run or root, with what they were made from elsewhere; and what could not be read."""
    reader, nodes, problems = ManifestReader(), {}, []
    uncommitted: list[str] = []
    uris = artifact_uris(place)
    reader.read(uris)
    for uri in uris:
        match reader.get(uri):
            case None:
                uncommitted.append(short_name(uri, place))
            case ArtifactError() as error:
                problems.append(f"{short_name(uri, place)} is damaged: {str(error).splitlines()[0]}")
            case manifest:
                _add(nodes, manifest)
    if uncommitted:
        problems.append(
            f"{len(uncommitted)} without a manifest, never committed or deleted: {', '.join(uncommitted[:3])}"
            f"{' ...' if len(uncommitted) > 3 else ''}"
        )
    elsewhere = [ref for node in nodes.values() for ref in node.inputs.values() if ref.digest not in nodes]
    return _walk(elsewhere, reader, nodes), problems


def users_of(nodes: dict[str, Node]) -> dict[str, list[str]]:
    """Digests of the nodes made directly from each digest."""
    users: dict[str, list[str]] = {}
    for digest, node in nodes.items():
        for ref in node.inputs.values():
            users.setdefault(ref.digest, []).append(digest)
    return users


def descendants(users: dict[str, list[str]], origins: Collection[str]) -> set[str]:
    """Digests of what was made from these, directly or through others; an origin only if made from another one."""
    found: set[str] = set()
    waiting = list(origins)
    while waiting:
        following = [user for user in users.get(waiting.pop(), []) if user not in found]
        found.update(following)
        waiting += following
    return found


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
    return isinstance(value, dict) and value.keys() == Ref.model_fields.keys()


def _sources(job: dict[str, JsonValue]) -> dict[str, str]:
    found = job.get("source_sha256")
    if isinstance(found, dict):
        return {name: str(value) for name, value in found.items()}
    function: JsonValue = job
    for name in _FUNCTIONS.get(str(job["stage"]), ()):
        function = function.get(name) if isinstance(function, dict) else None
    return {str(function["fn"]): str(found)} if found and isinstance(function, dict) else {}
