"""Retention: old policies and train states lose their files. Their manifests stay, so lineage and resume never break.

Rollouts, scores, evaluations and datasets are never pruned: what is pruned can be made again from them. Pruning one
artifact: `pruned.json` is created beside its manifest, then holds and published names are read once more, and then the
files go, or `pruned.json` goes when somebody has come to need them. A crash in between is finished by the next prune.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import AwareDatetime, Field, ValidationError

from forge_core import listing, storage
from forge_core import publication as publications
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.holds import held
from forge_core.operation import RetentionConfig
from forge_core.publication import Publication
from forge_core.retention_rules import Version, kept_by_number, to_prune
from forge_core.settings import Settings

logger = logging.getLogger(__name__)

KINDS = ("policies", "train_states")
# Only the pruner that created pruned.json may withdraw it, and only this long; another one acts on it only after twice
# as long, unless files are gone already. So nobody deletes files whose pruned.json is being withdrawn.
WITHDRAW_SECONDS = 150.0
ABANDONED_SECONDS = 2 * WITHDRAW_SECONDS


class Pruned(Settings):
    """What stands in `pruned.json`."""

    pruned_at: AwareDatetime
    rule: str = Field(description="The settings that did not keep it")


class PruneReport(Settings):
    """What a prune did; artifacts are named relative to the run, such as policies/v0003."""

    deleted: dict[str, int] = Field(default_factory=dict, description="Bytes that went, by artifact")
    kept: dict[str, str] = Field(default_factory=dict, description="Why an artifact keeps its files")
    left: dict[str, str] = Field(default_factory=dict, description="What is to go but has not yet, and why")

    @property
    def num_bytes(self) -> int:
        """Bytes that went in all."""
        return sum(self.deleted.values())


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact directory as a listing shows it."""

    uri: str
    sizes: dict[str, int]  # bytes by path below the URI

    @property
    def name(self) -> str:
        """Kind and version, such as policies/v0003."""
        return "/".join(self.uri.rsplit("/", 2)[1:])

    @property
    def number(self) -> int:
        """Its version."""
        return int(self.uri.rpartition("/v")[2])

    @property
    def is_marked(self) -> bool:
        """Whether it was pruned, or is to be."""
        return "pruned.json" in self.sizes

    def files(self, manifest: Manifest) -> dict[str, int]:
        """Bytes of the files that its manifest promises, of those that are there."""
        paths = {file.path: f"{manifest.attempt}/{file.path}" for file in manifest.files}
        return {name: self.sizes[path] for name, path in paths.items() if path in self.sizes}

    def is_readable(self, manifest: Manifest) -> bool:
        """Whether every file is there in its size."""
        return self.files(manifest) == {file.path: file.num_bytes for file in manifest.files}


def prune(run_uri: str, retention: RetentionConfig) -> PruneReport:
    """Delete the files of what the settings do not keep; with nothing to do, two listings and a few manifests are read.

    Raises ArtifactError for a published pointer that cannot be read, since it may need anything.
    """
    report = PruneReport()
    if retention.keep_last == 0:
        return report
    run_uri = storage.absolute_uri(run_uri)
    found = [artifact for kind in KINDS for artifact in _stored(f"{run_uri}/{kind}")]
    marked = [artifact for artifact in found if artifact.is_marked]
    _finish([artifact for artifact in marked if set(artifact.sizes) - {"manifest.json", "pruned.json"}], report)
    whole = {artifact.name: artifact for artifact in found if not artifact.is_marked}
    manifests = _manifests(whole, retention, report)
    condemned = _decide(run_uri, whole, manifests, retention, report)
    _prune([(whole[name], manifests[name]) for name in condemned], retention, report)
    if report.deleted:
        names = ", ".join(report.deleted)
        logger.info("pruned %s: %.1f MB of %s", names, report.num_bytes / 1e6, run_uri)
    return report


def needed_digests(root: str) -> dict[str, str]:
    """Digests that a hold or a published name needs, and why; raises ArtifactError for an unreadable pointer.

    Holds are read before pointers: who publishes holds the policy until the pointer stands. What a rollback would put
    back is needed as well.
    """
    needed = dict.fromkeys(held(root), "held")
    published = f"{storage.absolute_uri(root)}/published"
    for name in storage.list_names(published):
        uri = f"{published}/{name}/current.json"
        try:
            publication = Publication.model_validate_json(storage.read_bytes(uri))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except ValidationError as error:
            raise ArtifactError(f"{uri} is no publication, so nothing is pruned; publish {name} again") from error
        if (before := publications.previous(root, name)) is not None:
            needed[before.policy.digest] = f"a rollback of {name} needs it"
        if (newest := publications.champion(root, name)) is not None:  # the pointer may be one behind
            needed[newest.policy.digest] = f"published as {name}"
        needed[publication.policy.digest] = f"published as {name}"
    return needed


def _stored(uri: str) -> list[StoredArtifact]:
    """The committed versions below `{run}/{kind}`, oldest first."""
    sizes: dict[str, dict[str, int]] = {}
    for found in listing.list_objects(uri):
        name, _, path = found.path.partition("/")
        sizes.setdefault(name, {})[path] = found.num_bytes
    artifacts = [
        StoredArtifact(f"{uri}/{name}", paths)
        for name, paths in sizes.items()
        if re.fullmatch(r"v\d{4,}", name) and "manifest.json" in paths
    ]
    return sorted(artifacts, key=lambda artifact: artifact.number)


def _manifests(
    whole: Mapping[str, StoredArtifact], retention: RetentionConfig, report: PruneReport
) -> dict[str, Manifest]:
    """Manifests by name, of all but the policies that their number keeps."""
    numbers = [artifact.number for name, artifact in whole.items() if name.startswith("policies/")]
    spared = {f"policies/v{number:04d}" for number in kept_by_number(numbers, retention)}
    manifests = {}
    for name, artifact in whole.items():
        if name not in spared and (manifest := _manifest(artifact, report)) is not None:
            manifests[name] = manifest
    return manifests


def _manifest(artifact: StoredArtifact, report: PruneReport) -> Manifest | None:
    try:
        manifest = read_manifest(artifact.uri)
        problem = "its manifest is gone"
    except ArtifactError as error:
        manifest, problem = None, f"its manifest cannot be read: {error}"
    if manifest is None:
        logger.warning("%s is left alone: %s", artifact.uri, problem)
        report.kept[artifact.name] = problem
    return manifest


def _decide(
    run_uri: str,
    whole: Mapping[str, StoredArtifact],
    manifests: Mapping[str, Manifest],
    retention: RetentionConfig,
    report: PruneReport,
) -> tuple[str, ...]:
    """Names of what is to be pruned; holds, pointers and evaluations are read only when anything may be."""
    by_kind: dict[str, list[Version]] = {kind: [] for kind in KINDS}
    for name, artifact in whole.items():
        version, manifest = Version(artifact.number), manifests.get(name)
        if manifest is not None:
            stage, is_readable = str(manifest.job["stage"]), artifact.is_readable(manifest)
            version = Version(artifact.number, manifest.digest, stage, is_readable)
        if name not in report.kept:
            by_kind[name.partition("/")[0]].append(version)
    policies, states = by_kind["policies"], by_kind["train_states"]
    decision = to_prune(policies, states, retention)
    if decision.prune:
        scores = _scores(run_uri, [policy.number for policy in policies], retention.best_metric)
        needed = needed_digests(run_uri.rpartition("/")[0])
        decision = to_prune(policies, states, retention, needed=needed, scores=scores)
    report.kept.update(decision.kept)
    return decision.prune


def _scores(run_uri: str, numbers: list[int], metric: str | None) -> dict[int, float]:
    """The metric of each of these policy versions that was evaluated."""
    if metric is None:
        return {}
    evaluation, scores, others = metric.split("/")[1], {}, set()
    evaluated = set(storage.list_names(f"{run_uri}/evals"))
    for number in numbers:
        name = f"v{number:04d}"
        manifest = read_manifest(f"{run_uri}/evals/{name}/{evaluation}") if name in evaluated else None
        if manifest is not None and metric in manifest.summary:
            scores[number] = float(manifest.summary[metric])
        elif manifest is not None:
            others |= manifest.summary.keys()
    if others:
        logger.warning("retention.best_metric is %s; evaluations of %s have %s", metric, run_uri, sorted(others))
    return scores


def _prune(condemned: list[tuple[StoredArtifact, Manifest]], retention: RetentionConfig, report: PruneReport) -> None:
    """Mark all of it, look once more who needs it, and delete the rest."""
    if not condemned:
        return
    started = time.monotonic()
    content = Pruned(pruned_at=datetime.now(UTC), rule=f"retention: {retention.model_dump_json()}")
    ours = []
    for artifact, manifest in condemned:
        try:
            storage.create_exclusive(f"{artifact.uri}/pruned.json", content.model_dump_json(indent=1).encode())
            ours.append((artifact, manifest))
        except FileExistsError:
            report.left[artifact.name] = "another prune is at it"
    needed = needed_digests(condemned[0][0].uri.rsplit("/", 3)[0])
    for artifact, manifest in ours:
        reason = needed.get(manifest.digest)
        if reason is None:
            continue
        if time.monotonic() - started < WITHDRAW_SECONDS:
            listing.delete_object(f"{artifact.uri}/pruned.json")
            report.kept[artifact.name] = reason
        else:
            report.left[artifact.name] = reason
    for artifact, manifest in ours:
        if manifest.digest not in needed:
            listing.delete_below(manifest.files_uri)
            report.deleted[artifact.name] = sum(artifact.files(manifest).values())


def _finish(marked: list[StoredArtifact], report: PruneReport) -> None:
    """Delete what an earlier prune left behind."""
    for artifact in marked:
        manifest = _manifest(artifact, report)
        if manifest is None or not artifact.files(manifest):
            continue
        # Once a file is gone the verdict has been passed; while all are there, another pruner may be about to withdraw.
        if artifact.is_readable(manifest) and (reason := _not_yet(artifact, manifest)):
            report.left[artifact.name] = reason
            continue
        logger.info("finishing the prune of %s", artifact.uri)
        listing.delete_below(manifest.files_uri)
        report.deleted[artifact.name] = sum(artifact.files(manifest).values())


def _not_yet(artifact: StoredArtifact, manifest: Manifest) -> str | None:
    try:
        marker = Pruned.model_validate_json(storage.read_bytes(f"{artifact.uri}/pruned.json"))
    except FileNotFoundError:
        return "another prune has withdrawn"
    if (datetime.now(UTC) - marker.pruned_at).total_seconds() < ABANDONED_SECONDS:
        return "another prune may be at it"
    return needed_digests(artifact.uri.rsplit("/", 3)[0]).get(manifest.digest)
