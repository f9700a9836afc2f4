"""Why two artifacts are not the same: which settings, sources, software or inputs of theirs differ, down to the cause.

python -m forge_core.differences URI_A URI_B

"There" is A, "here" is B. A URI is an artifact, a published name, or a run (its newest policy).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import JsonValue

from forge_core.artifacts import ArtifactError, Manifest, Ref, resolve
from forge_core.jobs import StageJob
from forge_core.manifests import ManifestReader, find, short_name

_Pair = tuple[Manifest, Manifest]
_ABSENT = object()


class Difference(NamedTuple):
    """A field by its dotted path, and its value on either side as text."""

    path: str
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.path} ({self.there} there, {self.here} here)"


def field_differences(there: dict[str, JsonValue], here: dict[str, JsonValue]) -> list[Difference]:
    """Fields in which two jobs differ, inputs among them; what only says where and how a job runs is ignored."""
    return [
        difference
        for name in sorted((there.keys() | here.keys()) - StageJob.not_identity)
        for difference in _differences(name, there.get(name, _ABSENT), here.get(name, _ABSENT))
    ]


def job_differences(manifest: Manifest, job: dict[str, JsonValue], software: dict[str, str]) -> list[str]:
    """How the job that made an artifact (there) differs from this one (here): "sft.batch_size (32 there, 16 here)"."""
    differences = field_differences(manifest.job, job) + _software_differences(manifest.software, software)
    return [str(difference) for difference in differences]


def explain(a: Manifest, b: Manifest) -> list[str]:
    """Why `a` (there) and `b` (here) are not the same artifact, a line for each root cause; empty when they are.

    Inputs that differ are followed. A cause found in several places is told once, where it is nearest to the origin.
    """
    if a.digest == b.digest:
        return []
    reader = ManifestReader()
    parents: dict[tuple[str, str], _Pair | None] = {(a.digest, b.digest): None}
    causes: dict[str, list[_Pair]] = {}
    level = [(a, b)]
    while level:
        reader.read_ahead(ref for pair in level for manifest in pair for ref in manifest.inputs.values())
        following: list[_Pair] = []
        for pair in level:
            reasons, differing = _compare(*pair, reader)
            for reason in reasons:
                causes.setdefault(reason, []).append(pair)
            for there, here in differing:
                if (there.digest, here.digest) not in parents:
                    parents[there.digest, here.digest] = pair
                    following.append((there, here))
        level = following
    return [_because(reason, pairs, parents) for reason, pairs in causes.items()]


def _compare(a: Manifest, b: Manifest, reader: ManifestReader) -> tuple[list[str], list[_Pair]]:
    """How two artifacts themselves differ, as ends of sentences, and the pairs of their inputs that differ."""
    if a.job_digest == b.job_digest:
        return [f": same job, other bytes in {_other_files(a, b)} (non-determinism, or other hardware)"], []
    if a.job["stage"] != b.job["stage"]:
        return [f" because stage {a.job['stage']} made it there, {b.job['stage']} here"], []
    shared = [name for name in a.inputs if name in b.inputs]
    fields = [item for item in field_differences(a.job, b.job) if item.path.partition(".")[0] not in shared]
    reasons = [
        f" because {path} is {there} there, {here} here"
        for path, there, here in fields + _software_differences(a.software, b.software)
    ]
    differing: list[_Pair] = []
    for name in shared:
        if a.inputs[name].digest == b.inputs[name].digest:
            continue
        there, here = reader.resolve(a.inputs[name]), reader.resolve(b.inputs[name])
        if isinstance(there, Manifest) and isinstance(here, Manifest):
            differing.append((there, here))
            continue
        for side, ref, found in (("there", a.inputs[name], there), ("here", b.inputs[name], here)):
            if isinstance(found, str):
                reasons.append(f" because its {name} {short_name(ref.uri)} ({side}) is {found}")
    if not reasons and not differing:
        reasons.append(f" because their jobs were digested differently ({a.job_digest} there, {b.job_digest} here)")
    return reasons, differing


def _because(reason: str, pairs: list[_Pair], parents: dict[tuple[str, str], _Pair | None]) -> str:
    pair: _Pair | None = pairs[-1]
    names: list[str] = []
    while pair is not None:
        names.append(_name(*pair))
        pair = parents[pair[0].digest, pair[1].digest]
    names.reverse()
    if len(names) > 5:
        names[2:-2] = [f"... {len(names) - 4} more ..."]
    others = f" (and so do {len(pairs) - 1} more)" if len(pairs) > 1 else ""
    return " differs because ".join(names) + f" differs{reason}{others}"


def _differences(path: str, there: object, here: object) -> Iterator[Difference]:
    if isinstance(there, dict) and isinstance(here, dict) and there.keys() == here.keys() == Ref.model_fields.keys():
        if there["digest"] != here["digest"]:
            yield Difference(path, _show(there), _show(here))
    elif isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            yield from _differences(f"{path}.{key}", there.get(key, _ABSENT), here.get(key, _ABSENT))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, (left, right) in enumerate(zip(there, here, strict=True)):
            yield from _differences(f"{path}.{index}", left, right)
    elif there != here:
        yield Difference(path, _show(there), _show(here))


def _software_differences(there: dict[str, str], here: dict[str, str]) -> list[Difference]:
    return [
        Difference(f"software.{name}", there.get(name, "absent"), here.get(name, "absent"))
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _show(value: object) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, dict) and value.keys() == Ref.model_fields.keys():
        return f"digest {value['digest'][:12]}"
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:12]
    return repr(value)


def _other_files(a: Manifest, b: Manifest) -> str:
    there, here = ({file.path: file.sha256 for file in manifest.files} for manifest in (a, b))
    return ", ".join(name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name))


def _name(a: Manifest, b: Manifest) -> str:
    there, here = short_name(a.uri), short_name(b.uri)
    return there if there == here else f"{there} ({here} here)"


def main() -> None:
    """Command line: print why two artifacts differ."""
    parser = argparse.ArgumentParser(
        prog="python -m forge_core.differences", description="Say why two artifacts are not the same."
    )
    parser.add_argument("there", help="an artifact, a published name or a run")
    parser.add_argument("here", help="another one")
    arguments = parser.parse_args()
    try:
        a, b = resolve(find(arguments.there)), resolve(find(arguments.here))
        lines = explain(a, b)
    except (ArtifactError, ValueError) as error:
        sys.exit(str(error))
    if not lines:
        lines = [f"the same: digest {a.digest}"]
    elif a.files == b.files:
        lines.append("the files of both are the same, byte for byte")
    sys.stdout.write(f"there  {a.uri}\nhere   {b.uri}\n" + "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
