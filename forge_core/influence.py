"""What one example did: sampled for, trained on, and which policies came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import Field
from safetensors.numpy import load

from forge_core import storage
from forge_core.artifacts import ArtifactError, Manifest, Ref
from forge_core.examples import take
from forge_core.fit_config import SftConfig
from forge_core.lineage_graph import Scan, scan
from forge_core.lineage_text import ranges
from forge_core.manifests import NUM_THREADS, file_reader, short_name
from forge_core.settings import Settings
from forge_core.shards import is_part

Found = TypeVar("Found")


class SftUse(Settings):
    """A policy that was fine-tuned on the example."""

    policy: Ref
    dataset: Ref
    num_times: int = Field(description="Times the example was in a batch")


class RolloutUse(Settings):
    """A rollout set with completions of the example, under one scoring."""

    rollouts: Ref
    scored: Ref | None = Field(description="None when the rollout set was never scored")
    num_completions: int
    num_kept: int | None = Field(description="Completions kept for training; None when the scores cannot be read")
    updates: tuple[Ref, ...] = Field(description="Policies made by updates from these scores")

    @property
    def is_trained_on(self) -> bool:
        """Whether an update used completions of the example, or may have."""
        return self.num_kept != 0 and bool(self.updates)


class ExampleInfluence(Settings):
    """Where an example was used, in a run or in all runs under a root.

    Evaluations are left out: nothing learns there.
    """

    example_id: str
    place: str
    sft: tuple[SftUse, ...]
    rollouts: tuple[RolloutUse, ...]
    influenced: tuple[Ref, ...] = Field(description="Policies trained on the example, and all made from those")
    problems: tuple[str, ...] = Field(description="What could not be read, so that there may be more")


def influence_of_example(place: str, example_id: str) -> ExampleInfluence:
    """What an example did in a run ({root}/{run_id}) or in all runs under a root, and in what those were made from."""
    place = storage.absolute_uri(place)
    stored = scan(place)
    problems = [
        *stored.problems,
        *(f"{short_name(node.uri, place)} is {node.problem}" for node in stored.nodes.values() if node.problem),
    ]
    sft = _sft_uses(stored, example_id, problems)
    rollouts = _rollout_uses(stored, example_id, problems)
    origins = {use.policy.digest for use in sft}
    origins |= {policy.digest for use in rollouts if use.is_trained_on for policy in use.updates}
    reached = origins | stored.descendants(origins)
    return ExampleInfluence(
        example_id=example_id,
        place=place,
        sft=tuple(sft),
        rollouts=tuple(rollouts),
        influenced=tuple(
            node.ref(digest) for digest, node in stored.nodes.items() if digest in reached and node.kind == "policy"
        ),
        problems=tuple(problems),
    )


def as_text(found: ExampleInfluence) -> str:
    """The same for a terminal: trained on, then sampled only, then the policies that came of it."""

    def name(ref: Ref) -> str:
        return short_name(ref.uri, found.place)

    trained = [f"{name(use.policy)} by SFT, {use.num_times} times in a batch" for use in found.sft]
    sampled = []
    for use in found.rollouts:
        if use.scored is None:
            sampled.append(f"{name(use.rollouts)}: {use.num_completions} completions, never scored")
            continue
        num_kept = "?" if use.num_kept is None else use.num_kept
        kept = f"{name(use.rollouts)}: {num_kept} of {use.num_completions} completions kept by {name(use.scored)}"
        if use.is_trained_on:
            trained.append(f"{', '.join(name(policy) for policy in use.updates)} from {kept}")
        else:
            sampled.append(kept + (", which no update used" if not use.updates else ""))
    policies = ranges(name(ref) for ref in found.influenced)
    lines = [f"example {found.example_id} in {found.place}"]
    for title, part in (("trained on", trained), ("sampled, not trained on", sampled), ("influenced", policies)):
        lines += [f"{title}:{'' if part else ' nothing'}", *(f"  {line}" for line in part)]
    return "\n".join([*lines, *(f"! {problem}" for problem in found.problems)]) + "\n"


def _rollout_uses(stored: Scan, example_id: str, problems: list[str]) -> list[RolloutUse]:
    sets = [
        node.ref(digest) for digest, node in stored.nodes.items() if node.kind == "rollouts" and not is_part(node.uri)
    ]

    def rows_with_example(content: bytes) -> list[int]:
        rows = content.splitlines()
        return [index for index, row in enumerate(rows) if json.loads(row)["example"]["id"] == example_id]

    rows = _look_into(stored, sets, "rollouts.jsonl", rows_with_example, problems)
    scored = [ref for digest in rows for ref in stored.users.get(digest, []) if ref.kind == "scored"]
    keeps = _look_into(stored, scored, "scores.safetensors", lambda content: load(content)["keep"].tolist(), problems)
    uses = []
    for rollouts in [ref for ref in sets if rows.get(ref.digest)]:
        scorings = [ref for ref in stored.users.get(rollouts.digest, []) if ref.kind == "scored"]
        for scoring in scorings or [None]:
            keep = keeps.get(scoring.digest) if scoring else []
            users = stored.users.get(scoring.digest, []) if scoring else []
            uses.append(
                RolloutUse(
                    rollouts=rollouts,
                    scored=scoring,
                    num_completions=len(rows[rollouts.digest]),
                    num_kept=None if keep is None else sum(keep[index] for index in rows[rollouts.digest] if keep),
                    updates=tuple(ref for ref in users if ref.kind == "policy"),
                )
            )
    return uses


def _sft_uses(stored: Scan, example_id: str, problems: list[str]) -> list[SftUse]:
    """SFT takes the first places of the dataset's stream, so what it saw is known exactly."""
    tuned = {digest: node for digest, node in stored.nodes.items() if node.stage == "sft"}
    datasets = list({node.inputs["dataset"].digest: node.inputs["dataset"] for node in tuned.values()}.values())

    def ids_of(content: bytes) -> list[str]:
        return [json.loads(row)["id"] for row in content.splitlines()]

    ids = _look_into(stored, datasets, "examples.jsonl", ids_of, problems)
    uses = []
    for digest, node in tuned.items():
        dataset = node.inputs["dataset"]
        found = ids.get(dataset.digest, [])
        if example_id not in found:
            continue
        settings, num_steps = SftConfig.model_validate(node.settings["sft"]), int(node.summary["sft/steps"])
        count = sum(settings.places(num_steps - 1, len(found))) if num_steps else 0
        manifest = stored.reader.resolve(dataset)
        assert isinstance(manifest, Manifest)  # its examples have been read
        assert node.seed is not None
        content = manifest.sha256_of("examples.jsonl")
        taken = take(len(found), start=0, count=count, seed=node.seed, digest=content)
        if num_times := sum(found[index] == example_id for index in taken):
            uses.append(SftUse(policy=node.ref(digest), dataset=dataset, num_times=num_times))
    return uses


def _look_into(
    stored: Scan, refs: list[Ref], file: str, look: Callable[[bytes], Found], problems: list[str]
) -> dict[str, Found]:
    """What `look` finds in a file of each of these artifacts, by digest; those that cannot be read become problems."""
    manifests = [stored.reader.resolve(ref) for ref in refs]
    intact = [manifest for manifest in manifests if isinstance(manifest, Manifest)]
    readers = [file_reader(manifest, file) for manifest in intact]

    def read(reader: Callable[[], bytes]) -> Found | ArtifactError:
        try:
            return look(reader())
        except ArtifactError as error:
            return error

    found: dict[str, Found] = {}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for manifest, result in zip(intact, pool.map(read, readers), strict=True):
            if isinstance(result, ArtifactError):
                problems.append(str(result))
            else:
                found[manifest.digest] = result
    return found
