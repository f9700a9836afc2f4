"""Lineage for a terminal."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable

from forge_core.artifacts import Ref
from forge_core.lineage_graph import Lineage, Node
from forge_core.manifests import root_of, run_of, short_name

WIDTH = 100
# Figures that tell a person at a glance which artifact this is.
_FIGURES = ("dataset/examples", "sft/loss", "reward/mean", "tokens/trained", "tokens/generated")
# Differs from one iteration to the next, and stands in the version as well.
_NOT_SHOWN = ("first_prompt",)


def as_tree(lineage: Lineage, width: int = WIDTH) -> str:
    """What an artifact was made from: policies newest first, under each the rollouts and scores that made it.

    An artifact named again is "(above)"; a policy named without that follows below. Settings are shown where they
    differ from those of the artifact of the same stage before.
    """
    return "\n".join(_Tree(lineage, width).lines()) + "\n"


def as_list(lineage: Lineage, place: str, width: int = WIDTH) -> str:
    """What was made from an artifact, consecutive versions in one line."""
    refs = [uri for node in list(lineage.nodes.values())[1:] for uri in (node.uri, *node.copies)]
    name = short_name(lineage.artifact.uri, place)
    lines = [f"{name}, digest {lineage.artifact.digest[:12]}, went into {len(refs)} artifacts under {place}"]
    lines += [f"  {line}" for line in ranges(short_name(uri, place) for uri in refs)]
    for problem in lineage.problems:
        lines += textwrap.wrap(f"! {problem}", width, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def ranges(names: Iterable[str]) -> list[str]:
    """Sorted names, each sequence of consecutive versions as one: "run/policies/v0002 .. v0016 (15)"."""

    def series(item: tuple[int, str]) -> tuple[str, int]:
        prefix, version = re.fullmatch(r"(.*?)(\d*)", item[1]).groups()  # type: ignore[union-attr]
        return prefix, int(version) - item[0] if version else -1

    found = []
    for _, group in itertools.groupby(enumerate(sorted(set(names))), series):
        members = [name for _, name in group]
        last = members[-1].rpartition("/")[2]
        found.append(f"{members[0]} .. {last} ({len(members)})" if len(members) > 1 else members[0])
    return found


def flatten(value: object, prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names, {"grpo.group_size": "8", ...}."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: "" if value is None else str(value)}
    return {
        name: text for key, item in items for name, text in flatten(item, f"{prefix}.{key}" if prefix else key).items()
    }


class _Tree:
    """Lines of a tree in the making: what has been expanded, and the settings last shown of each stage."""

    def __init__(self, lineage: Lineage, width: int) -> None:
        self._nodes = lineage.nodes
        self._artifact = lineage.artifact
        self._width = width
        self._expanded: set[str] = set()
        self._shown: dict[str, dict[str, dict[str, str]]] = {}
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        self._lines = [f"lineage of {self._artifact.uri}", f"digest {self._artifact.digest}", ""]
        spine = [digest for digest, node in self._nodes.items() if node.kind == "policy"]
        for digest in dict.fromkeys([self._artifact.digest, *spine]):
            self._expand(digest, "", "")
        for problem in [node for node in self._nodes.values() if node.problem is not None]:
            self._write(f"! {self._name(problem.uri)} is {problem.problem}", "", "  ")
        return self._lines

    def _expand(self, digest: str, first: str, rest: str) -> None:
        """The node and, nested, its inputs that are no policies: those have places of their own."""
        self._expanded.add(digest)
        node = self._nodes[digest]
        nested = [ref for ref in node.inputs.values() if self._is_nested(ref)]
        under = rest + ("│  " if nested else "   ")
        self._write(self._headline(digest, node, nested), first, under)
        for line in self._details(node):
            self._write(line, under, under + "  ")
        for ref in nested:
            is_last = ref is nested[-1]
            if ref.digest in self._expanded:  # by a sibling, or below one
                self._write(self._mention(ref), rest + ("└─ " if is_last else "├─ "), rest)
            else:
                self._expand(ref.digest, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "))

    def _is_nested(self, ref: Ref) -> bool:
        return ref.kind != "policy" and ref.digest not in self._expanded

    def _headline(self, digest: str, node: Node, nested: list[Ref]) -> str:
        if node.problem is not None:
            return f"{self._name(node.uri)}  ! {node.problem}"
        mentions = ", ".join(self._mention(ref) for ref in node.inputs.values() if ref not in nested)
        made = f"{node.stage} of {mentions}" if mentions else node.stage
        figure = next((f"  {name} {node.summary[name]:.4g}" for name in _FIGURES if name in node.summary), "")
        reused = f"  copied from {self._name(node.reused_from.uri)}" if node.reused_from else ""
        return f"{self._name(node.uri)}  {digest[:12]}  {made}{figure}{reused}"

    def _mention(self, ref: Ref) -> str:
        return f"{self._name(ref.uri)}{' (above)' if ref.digest in self._expanded else ''}"

    def _details(self, node: Node) -> list[str]:
        """What made the node, where it differs from the one of the same stage before."""
        if node.problem is not None:
            return []
        settings = {name: value for name, value in node.settings.items() if name not in _NOT_SHOWN}
        parts: dict[str, dict[str, str]] = {
            "settings": flatten(settings) if settings else {},
            "source": {name: sha256[:12] for name, sha256 in node.source_sha256.items()},
            "software": node.software,
            "seed": {} if node.seed is None else {"seed": str(node.seed)},
        }
        before = self._shown.get(node.stage, {})
        self._shown[node.stage] = parts
        lines = []
        for part, values in parts.items():
            past = before.get(part, {})
            changed = [f"{name}={value or None}" for name, value in values.items() if past.get(name) != value]
            changed += [f"{name} unset" for name in past if name not in values]
            if changed:
                lines.append(" ".join(changed) if part == "seed" else f"{part} {' '.join(changed)}")
        return lines

    def _name(self, uri: str) -> str:
        is_near = run_of(uri) == run_of(self._artifact.uri)
        if not is_near and root_of(uri) == root_of(self._artifact.uri):
            return short_name(uri, root_of(uri))
        return short_name(uri) if is_near else uri

    def _write(self, text: str, first: str, rest: str) -> None:
        self._lines += textwrap.wrap(
            text,
            self._width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
