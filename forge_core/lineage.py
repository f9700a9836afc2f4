"""Where an artifact comes from, and what became of one.

    python -m forge_core.lineage URI                   what it was made from, down to datasets and settings
    python -m forge_core.lineage URI --influenced      what was made from it, in all runs under its root
    python -m forge_core.lineage URI --example ID      what one example did, in a run or in all runs under a root

A URI is an artifact, a published name ({root}/published/{name}), or a run (its newest policy). `--json FILE` writes the
same with full digests, settings and summaries.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forge_core.artifacts import ArtifactError
from forge_core.influence import as_text, influence_of_example
from forge_core.lineage_graph import Lineage, Node, downstream, upstream
from forge_core.lineage_text import as_list, as_tree
from forge_core.manifests import find, root_of
from forge_core.settings import Settings

__all__ = ["Lineage", "Node", "as_tree", "downstream", "find", "influence_of_example", "upstream"]


def describe(uri: str, *, influenced: bool, example: str | None) -> tuple[str, Settings]:
    """The answer as text for a terminal, and as a model for JSON."""
    if example is not None:
        found = influence_of_example(uri, example)
        return as_text(found), found
    ref = find(uri)
    if influenced:
        root = root_of(ref.uri)
        lineage = downstream(root, ref)
        return as_list(lineage, root), lineage
    lineage = upstream(ref)
    return as_tree(lineage), lineage


def main() -> None:
    """Command line: print an artifact's lineage."""
    parser = argparse.ArgumentParser(prog="python -m forge_core.lineage", description="Say what made an artifact.")
    parser.add_argument("uri", help="an artifact, a published name or a run; with --example a run or a root")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the same as JSON")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--influenced", action="store_true", help="what was made from it instead")
    question.add_argument("--example", metavar="ID", help="what this example of a dataset did")
    arguments = parser.parse_args()
    try:
        text, model = describe(arguments.uri, influenced=arguments.influenced, example=arguments.example)
    except (ArtifactError, ValueError) as error:
        sys.exit(str(error))
    if arguments.json is not None:
        arguments.json.write_text(model.model_dump_json(indent=1))
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
