"""Holds: "somebody is reading this", so that retention leaves an artifact alone.

    {root}/holds/{digest}/{random}.json      who, why, and until when

A hold that has expired counts as absent: a killed reader does not pin an artifact for ever. Times are those of the
machines' clocks, so a hold lasts an hour unless told otherwise, and is renewed at half time.

Reader and pruner never meet, because each announces itself before it looks for the other:

    reader  1. creates its hold   2. looks for pruned.json, and gives up when it is there   3. reads
    pruner  1. creates pruned.json   2. looks for holds, and deletes pruned.json again when one is there   3. deletes

Whichever comes second sees the first. When both come at once, the reader gives up and the files stay: ask again.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from pydantic import AwareDatetime, Field, ValidationError

from forge_core import listing, storage
from forge_core.artifacts import ArtifactError, Ref, require_unpruned
from forge_core.settings import Settings

logger = logging.getLogger(__name__)

HOLD_SECONDS = 3600.0


class Hold(Settings):
    """What stands in `{root}/holds/{digest}/{random}.json`."""

    ref: Ref
    holder: str = Field(description="host:pid")
    reason: str
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = Field(description="None: until it is removed by hand")

    def is_expired(self, now: datetime) -> bool:
        """Whether it counts as absent."""
        return self.expires_at is not None and self.expires_at <= now


@contextmanager
def hold(root: str, ref: Ref, reason: str, seconds: float = HOLD_SECONDS) -> Iterator[None]:
    """Keep an artifact from being pruned while the block runs, however long that takes.

    A killed process holds for at most `seconds` more. Raises ArtifactError when the artifact is pruned already.
    """
    uri, content = _create(root, ref, reason, seconds)
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(uri, content, seconds, ended), name="hold", daemon=True)
    renewal.start()
    try:
        require_unpruned(ref.uri)
        yield
    finally:
        ended.set()
        renewal.join()
        listing.delete_object(uri)


def keep(root: str, ref: Ref, reason: str) -> str:
    """URI of a hold that lasts until this object is deleted; raises ArtifactError when the artifact is pruned."""
    uri, _ = _create(root, ref, reason, None)
    try:
        require_unpruned(ref.uri)
    except ArtifactError:
        listing.delete_object(uri)
        raise
    return uri


def held(root: str) -> set[str]:
    """Digests of the artifacts that somebody holds."""
    prefix, now = f"{storage.absolute_uri(root)}/holds", datetime.now(UTC)
    return {
        found.path.partition("/")[0]
        for found in listing.list_objects(prefix)
        if found.path.endswith(".json") and not has_ended(f"{prefix}/{found.path}", now)
    }


def has_ended(uri: str, now: datetime) -> bool:
    """Whether a hold has been removed or has expired; one that cannot be read counts as held."""
    try:
        return Hold.model_validate_json(storage.read_bytes(uri)).is_expired(now)
    except FileNotFoundError:
        return True
    except ValidationError as error:
        logger.warning("%s is no hold, the artifact counts as held: %s", uri, error)
        return False


def _create(root: str, ref: Ref, reason: str, seconds: float | None) -> tuple[str, Hold]:
    now = datetime.now(UTC)
    uri = f"{storage.absolute_uri(root)}/holds/{ref.digest}/{secrets.token_hex(8)}.json"
    content = Hold(
        ref=ref,
        holder=f"{socket.gethostname()}:{os.getpid()}",
        reason=reason,
        created_at=now,
        expires_at=now + timedelta(seconds=seconds) if seconds is not None else None,
    )
    storage.create_exclusive(uri, content.model_dump_json(indent=1).encode())
    return uri, content


def _renew(uri: str, content: Hold, seconds: float, ended: threading.Event) -> None:
    while not ended.wait(seconds / 2):
        try:
            later = content.model_copy(update={"expires_at": datetime.now(UTC) + timedelta(seconds=seconds)})
            storage.write_atomic(uri, later.model_dump_json(indent=1).encode())
        except OSError as error:
            logger.warning("cannot renew the hold %s, trying again in %.0f s: %s", uri, seconds / 2, error)
