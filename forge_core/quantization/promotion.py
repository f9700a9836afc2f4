"""The published quantized policy: what it was before stays known, and one command puts it back.

python -m forge_core.quantization.promotion ROOT NAME     rolls {root}/published/NAME back
"""

from __future__ import annotations

import argparse
import logging
import sys

from forge_core import storage
from forge_core.artifacts import Ref, resolve
from forge_core.holds import hold
from forge_core.publication import Publication, publish, published_uri


def promote(root: str, name: str, policy: Ref, *, run_id: str, metrics: dict[str, float | int]) -> Publication:
    """Publish a policy and remember the one it replaces; publishing the same one again forgets nothing."""
    current = read_publication(root, name, "current")
    if current is not None and current.policy == policy:
        return current
    if current is not None:
        _write(root, name, "previous", current)
    return publish(root, name, policy, run_id=run_id, metrics=metrics)


def roll_back(root: str, name: str) -> Publication:
    """Publish the previous policy again; what was current becomes previous, so a second call undoes the first.

    Raises ValueError when there is no previous one, ArtifactError when its artifact is gone.
    """
    current, previous = read_publication(root, name, "current"), read_publication(root, name, "previous")
    if current is None or previous is None:
        raise ValueError(f"{published_uri(root, name)} has no previous policy to go back to")
    resolve(previous.policy)
    with hold(root, previous.policy, f"rollback of {name}"):
        # The pointer last: a writer killed in between has changed nothing that anybody serves.
        _write(root, name, "previous", current)
        _write(root, name, "current", previous)
    return previous


def read_publication(root: str, name: str, which: str) -> Publication | None:
    """The current or the previous publication of a name, None when there is none."""
    uri = f"{published_uri(root, name)}/{which}.json"
    return Publication.model_validate_json(storage.read_bytes(uri)) if storage.exists(uri) else None


def _write(root: str, name: str, which: str, publication: Publication) -> None:
    content = publication.model_dump_json(indent=1).encode()
    storage.write_atomic(f"{published_uri(root, name)}/{which}.json", content)


def main() -> None:
    """Command line: roll a published name back."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="python -m forge_core.quantization.promotion", description=__doc__)
    parser.add_argument("root", help="a directory or any fsspec URI")
    parser.add_argument("name", help="published name, e.g. quickstart-quantized")
    arguments = parser.parse_args()
    published = roll_back(arguments.root, arguments.name)
    sys.stdout.write(f"{published.name} -> {published.hf_uri}\n")


if __name__ == "__main__":
    main()
