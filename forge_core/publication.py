"""Publication: a name that points at a policy version, moved by one atomic overwrite."""

from __future__ import annotations

from datetime import UTC, datetime

from forge_core import storage
from forge_core.artifacts import Ref, resolve
from forge_core.holds import hold
from forge_core.settings import Settings


class Publication(Settings):
    """What stands in `{root}/published/{name}/current.json`."""

    name: str
    policy: Ref
    hf_uri: str
    run_id: str
    metrics: dict[str, float | int]
    published_at: str


def publish(root: str, name: str, policy: Ref, *, run_id: str, metrics: dict[str, float | int]) -> Publication:
    """Point `{root}/published/{name}` at a committed policy version; readers see the old pointer or the new one."""
    manifest = resolve(policy)
    publication = Publication(
        name=name,
        policy=policy,
        hf_uri=manifest.files_uri,
        run_id=run_id,
        metrics=metrics,
        published_at=datetime.now(UTC).isoformat(),
    )
    content = publication.model_dump_json(indent=1).encode()
    with hold(root, policy, f"publication as {name}"):  # until the pointer itself keeps it from being pruned
        storage.write_atomic(published_uri(root, name) + "/current.json", content)
    return publication


def published_uri(root: str, name: str) -> str:
    """Prefix of a published name."""
    return f"{storage.absolute_uri(root)}/published/{name}"
