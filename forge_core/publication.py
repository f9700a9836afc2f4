"""Publication: a name that points at a policy version, and the history of what it has pointed at.

    {root}/published/{name}/v0007.json      one for each promotion and each rollback, created once and never changed
    {root}/published/{name}/current.json    a copy of the newest one, which is what readers follow

Creating the record is the promotion. Of two writers at once one gets the number and the other one the next, or is told
that the champion has changed when it was compared with the one before. The pointer follows by an atomic overwrite; a
writer that dies in between leaves it one behind, and whoever publishes next, or the same run again, puts it right.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pydantic import Field, ValidationError

from forge_core import storage
from forge_core.artifacts import ArtifactError, Ref, new_attempt, resolve
from forge_core.gates import GateResult
from forge_core.holds import hold
from forge_core.settings import Settings

QUANTIZED_SUFFIX = "-quantized"  # a policy NAME has its quantized form published beside it
_RECORD = re.compile(r"v(\d{4,})\.json")


class Publication(Settings):
    """What stands in a record of the history, and in `current.json`."""

    name: str
    version: int = Field(ge=1, description="Its number in the history")
    previous: int | None = Field(description="The record that a rollback goes back to, None when there is none")
    restores: int | None = Field(None, description="The record that a rollback has put back")
    attempt: str = Field(description="Tells this writer's record from that of another one")
    policy: Ref
    hf_uri: str
    run_id: str
    metrics: dict[str, float | int]
    gates: tuple[GateResult, ...] = Field((), description="How it fared at them; a failure was overruled by hand")
    published_at: str


class ChampionChangedError(RuntimeError):
    """Somebody else published after the champion was looked at."""


def publish(
    root: str,
    name: str,
    policy: Ref,
    *,
    run_id: str,
    metrics: dict[str, float | int],
    gates: tuple[GateResult, ...] = (),
    replaces: int | None = None,
) -> Publication:
    """Point `{root}/published/{name}` at a committed policy version; readers see the old pointer or the new one.

    `replaces` is the version of the champion that the policy was compared with, 0 when there was none: raises
    ChampionChangedError when it is another one by now. A policy is published once by a run: when that is repeated,
    nothing moves, since somebody may have rolled it back.
    """
    hf_uri = resolve(policy).files_uri
    with hold(root, policy, f"publication as {name}"):  # until the pointer itself keeps it from being pruned
        while True:
            if (published := find_published(root, name, policy, run_id)) is not None:
                break
            newest = max(versions(root, name), default=0)
            if replaces is not None and newest != replaces:
                raise ChampionChangedError(f"{name} is at version {newest} by now, it was at {replaces}")
            published = Publication(
                name=name,
                version=newest + 1,
                previous=newest or None,
                attempt=new_attempt(),
                policy=policy,
                hf_uri=hf_uri,
                run_id=run_id,
                metrics=metrics,
                gates=gates,
                published_at=datetime.now(UTC).isoformat(),
            )
            if _create(root, published):
                break
        _point_at_newest(root, name)
    return published


def rollback(root: str, name: str, *, to: int | None = None) -> Publication:
    """Put back what was published before, or the version `to`; returns the record of that.

    The next rollback goes back further, and `to` the version rolled back from undoes it. Raises ArtifactError when
    there is nothing to go back to, or when retention has taken its files.
    """
    newest = champion(root, name)
    if newest is None:
        raise ArtifactError(f"{published_uri(root, name)} has no history; publish something first")
    number = to if to is not None else newest.previous
    if number is None:
        raise ArtifactError(f"nothing was published before {name} v{newest.version:04d}; name a version to go to")
    target = read_version(root, name, number)
    resolve(target.policy)
    with hold(root, target.policy, f"rollback of {name}"):
        restored = target.model_copy(
            update={
                "version": newest.version + 1,
                "attempt": new_attempt(),
                "restores": target.restores or target.version,
                "published_at": datetime.now(UTC).isoformat(),
            }
        )
        if not _create(root, restored):
            raise ChampionChangedError(f"{name} was published meanwhile; look at it and roll back again")
        _point_at_newest(root, name)
    return restored


def champion(root: str, name: str) -> Publication | None:
    """The newest record of a name, None when nothing was published yet."""
    numbers = versions(root, name)
    return read_version(root, name, numbers[-1]) if numbers else None


def find_published(root: str, name: str, policy: Ref, run_id: str) -> Publication | None:
    """The record by which a run published a policy under a name, None when it has not."""
    return next((one for one in history(root, name) if (one.policy, one.run_id) == (policy, run_id)), None)


def previous(root: str, name: str) -> Publication | None:
    """What a rollback would put back, None when there is nothing."""
    newest = champion(root, name)
    return read_version(root, name, newest.previous) if newest and newest.previous else None


def history(root: str, name: str) -> list[Publication]:
    """Every record of a name, oldest first."""
    return [read_version(root, name, number) for number in versions(root, name)]


def versions(root: str, name: str) -> list[int]:
    """Numbers of the records of a name, oldest first."""
    found = (_RECORD.fullmatch(entry) for entry in storage.list_names(published_uri(root, name)))
    return sorted(int(match[1]) for match in found if match)


def read_version(root: str, name: str, version: int) -> Publication:
    """One record of a name; raises ArtifactError when there is none or it cannot be read."""
    uri = _record_uri(root, name, version)
    try:
        return Publication.model_validate_json(storage.read_bytes(uri))
    except FileNotFoundError as error:
        known = ", ".join(map(str, versions(root, name))) or "none"
        raise ArtifactError(f"{uri} does not exist; versions of {name}: {known}") from error
    except ValidationError as error:
        raise ArtifactError(f"{uri} is no publication: {error.error_count()} fields are wrong") from error


def published_uri(root: str, name: str) -> str:
    """Prefix of a published name; raises ValueError for a name that would lead elsewhere."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
        raise ValueError(f"name is {name!r}; a published name has lower-case letters, digits, '-', '_' and '.' only")
    return f"{storage.absolute_uri(root)}/published/{name}"


def _record_uri(root: str, name: str, version: int) -> str:
    return f"{published_uri(root, name)}/v{version:04d}.json"


def _create(root: str, publication: Publication) -> bool:
    """Whether this writer got the number."""
    uri = _record_uri(root, publication.name, publication.version)
    try:
        storage.create_exclusive(uri, publication.model_dump_json(indent=1).encode())
    except FileExistsError:
        return False
    return True


def _point_at_newest(root: str, name: str) -> None:
    """Make the pointer a copy of the newest record, also when others do so at the same time.

    Whoever overwrites it looks again, so the last one to write has seen every record that was there before it.
    """
    newest = None
    while (number := versions(root, name)[-1]) != newest:
        newest = number
        content = storage.read_bytes(_record_uri(root, name, number))
        storage.write_atomic(f"{published_uri(root, name)}/current.json", content)
