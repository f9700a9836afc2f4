"""What one example did: sampled for, trained on, and which policies came of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import Field
from safetensors.numpy import load

from forge_core import storage
from forge_core.artifacts import ArtifactError, Kind, Manifest, Ref, resolve
from forge_core.examples import take
from forge_core.jobs import SftJob
from forge_core.lineage_graph import descendants, scan, users_of
from forge_core.lineage_text import ranges
from forge_core.manifests import NUM_THREADS, read_file, short_name
from forge_core.settings import Settings

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
    nodes, problems = scan(place)
    problems += [f"{short_name(node.uri, place)} is {node.problem}" for node in nodes.values() if node.problem]
    users = users_of(nodes)
    refs = {digest: Ref(kind=node.kind, uri=node.uri, digest=digest) for digest, node in nodes.items()}

    def made_by(*stages: str) -> list[Ref]:
        return [refs[digest] for digest, node in nodes.items() if node.stage in stages and node.kind != "train_state"]

    places = _read_all(_places_in_rollouts, made_by("rollout"), example_id, problems)
    scorings = [ref for digest in places for ref in _users(refs, users, digest, "scored")]
    keeps = _read_all(_keep, scorings, example_id, problems)
    rollouts: list[RolloutUse] = []
    for digest, rows in places.items():
        of_set = {"rollouts": refs[digest], "num_completions": len(rows)}
        scored_sets = _users(refs, users, digest, "scored")
        for scored in scored_sets:
            num_kept = sum(keeps[scored.digest][row] for row in rows) if scored.digest in keeps else None
            updates = tuple(_users(refs, users, scored.digest, "policy"))
            rollouts.append(RolloutUse(**of_set, scored=scored, num_kept=num_kept, updates=updates))
        if not scored_sets:
            rollouts.append(RolloutUse(**of_set, scored=None, num_kept=0, updates=()))
    times = _read_all(_times_in_sft, made_by("sft"), example_id, problems)
    sft = [
        SftUse(policy=refs[digest], dataset=nodes[digest].inputs["dataset"], num_times=count)
        for digest, count in times.items()
    ]
    origins = {use.policy.digest for use in sft}
    origins |= {policy.digest for use in rollouts if use.is_trained_on for policy in use.updates}
    reached = origins | descendants(users, origins)
    return ExampleInfluence(
        example_id=example_id,
        place=place,
        sft=tuple(sft),
        rollouts=tuple(rollouts),
        influenced=tuple(ref for digest, ref in refs.items() if digest in reached and ref.kind == "policy"),
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


def _users(refs: dict[str, Ref], users: dict[str, list[str]], digest: str, kind: Kind) -> list[Ref]:
    return [refs[user] for user in users.get(digest, []) if refs[user].kind == kind]


def _read_all(
    read: Callable[[Manifest, str], Found], refs: list[Ref], example_id: str, problems: list[str]
) -> dict[str, Found]:
    """What `read` finds about the example in each of these artifacts, by digest, where it finds anything."""

    def read_one(ref: Ref) -> Found | ArtifactError:
        try:
            return read(resolve(ref), example_id)
        except ArtifactError as error:
            return error

    found: dict[str, Found] = {}
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for ref, result in zip(refs, pool.map(read_one, refs), strict=True):
            if isinstance(result, ArtifactError):
                problems.append(str(result))
            elif result:
                found[ref.digest] = result
    return found


def _places_in_rollouts(rollouts: Manifest, example_id: str) -> list[int]:
    rows = read_file(rollouts, "rollouts.jsonl").splitlines()
    return [place for place, row in enumerate(rows) if json.loads(row)["example"]["id"] == example_id]


def _keep(scored: Manifest, _example_id: str) -> list[bool]:
    return load(read_file(scored, "scores.safetensors"))["keep"].tolist()


def _times_in_sft(policy: Manifest, example_id: str) -> int:
    """How often the example was in a batch: SFT takes the first steps x batch_size places of the dataset's stream."""
    job = SftJob.model_validate(policy.job)
    rows = read_file(resolve(job.dataset), "examples.jsonl").splitlines()
    count = int(policy.summary["sft/steps"]) * job.sft.batch_size
    taken = take(len(rows), start=0, count=count, seed=job.seed, digest=job.dataset.digest) if count else []
    ids = [json.loads(row)["id"] for row in rows]
    return sum(ids[index] == example_id for index in taken)
