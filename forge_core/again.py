"""Settings of the flows that start from what another run has stored: branch, re-score, redo an update, replay."""

from __future__ import annotations

from typing import TypeVar

from pydantic import Field, JsonValue

from forge_core import storage
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.config import FunctionConfig, PostTrainConfig, RewardConfig
from forge_core.credentials import NO_CREDENTIALS, StoredSettings
from forge_core.functions import reward_sources, source_sha256
from forge_core.jobs import ScoreJob, UpdateJob
from forge_core.runs import read_run


class BranchConfig(StoredSettings):
    """A new run from a policy version of another one."""

    run: str = Field(description="URI of the run to branch from, {root}/{run_id}", json_schema_extra=NO_CREDENTIALS)
    version: int = Field(ge=0, description="Policy version to start from; its optimizer state is not taken along")
    changes: dict[str, JsonValue] = Field(
        default_factory=dict, description="Settings that differ from those of the run, e.g. {grpo.loss.fn: dapo}"
    )


class RescoreConfig(StoredSettings):
    """Other rewards for the rollouts that a run has stored."""

    run: str = Field(
        description="URI of the run whose rollouts are scored, {root}/{run_id}", json_schema_extra=NO_CREDENTIALS
    )
    root: str = Field(".forge/store", description="Where the new scores go", json_schema_extra=NO_CREDENTIALS)
    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="Reward functions, summed with their weights")
    advantage: FunctionConfig = Field(FunctionConfig(fn="group_zscore"), description="Rewards of a group -> advantages")


class RedoConfig(StoredSettings):
    """An update once more, with another loss, from the same policy, optimizer state and scored rollouts."""

    policy: str = Field(
        description="URI of the policy version that the update made, {root}/{run_id}/policies/v0003",
        json_schema_extra=NO_CREDENTIALS,
    )
    root: str = Field(".forge/store", description="Where the new policy goes", json_schema_extra=NO_CREDENTIALS)
    loss: FunctionConfig = Field(description="Per-token policy loss")


class ReplayConfig(StoredSettings):
    """A run whose updates are recomputed from its stored rollouts and compared with what it published."""

    run: str = Field(description="URI of the run to verify, {root}/{run_id}", json_schema_extra=NO_CREDENTIALS)


AnyJob = TypeVar("AnyJob", ScoreJob, UpdateJob)


def branched(config: BranchConfig) -> PostTrainConfig:
    """The settings of the new run: those of the old one with its changes; SFT is left out when it has been done."""
    settings = read_run(storage.absolute_uri(config.run)).settings().model_dump(mode="json")
    settings["policy"]["uri"] = policy_uri(config.run, config.version)
    if config.version > 0 or "sft" not in settings:
        settings["sft"] = {"num_steps": 0}
    if "grpo" not in settings:
        settings["grpo"] = {"num_iterations": 0}
    for name, value in config.changes.items():
        _change(settings, name, value)
    return PostTrainConfig.model_validate(settings)


def policy_uri(run: str, version: int) -> str:
    """URI of a policy version of a run; raises ArtifactError when there is none."""
    uri = f"{storage.absolute_uri(run)}/policies/v{version:04d}"
    if read_manifest(uri) is None:
        versions = ", ".join(storage.list_names(f"{storage.absolute_uri(run)}/policies")) or "none"
        raise ArtifactError(f"{uri} does not exist; this run has {versions}")
    return uri


def updates_of(run: str) -> list[Manifest]:
    """The policy versions of a run that updates made, oldest first."""
    uri = f"{storage.absolute_uri(run)}/policies"
    manifests = [read_manifest(f"{uri}/{name}") for name in storage.list_names(uri)]
    found = [manifest for manifest in manifests if manifest is not None and manifest.job["stage"] == "update"]
    if not found:
        raise ArtifactError(f"{uri} holds no policy that an update made; give the URI of a run with GRPO iterations")
    return found


def scores_of(run: str) -> list[Manifest]:
    """The scored rollout sets of a run, oldest first."""
    uri = f"{storage.absolute_uri(run)}/scored"
    manifests = [read_manifest(f"{uri}/{name}") for name in storage.list_names(uri)]
    found = [manifest for manifest in manifests if manifest is not None]
    if not found:
        raise ArtifactError(f"{uri} holds no scored rollouts; give the URI of a run with GRPO iterations")
    return found


def rescore_job(scored: Manifest, config: RescoreConfig, run_uri: str) -> ScoreJob:
    """The scoring of a stored rollout set with other rewards."""
    sources = reward_sources(config.rewards)
    changes: dict[str, object] = {
        "output": f"{run_uri}/scored/{version_of(scored)}",
        "rewards": config.rewards,
        "advantage": config.advantage,
        "source_sha256": sources | {config.advantage.fn: source_sha256(config.advantage, "advantage")},
    }
    return _again(ScoreJob.model_validate(scored.job), changes)


def redo_job(policy: Manifest, run_uri: str, loss: FunctionConfig | None = None) -> UpdateJob:
    """The update that made a policy, with its output elsewhere and perhaps another loss."""
    changes: dict[str, object] = {"output": f"{run_uri}/policies/{version_of(policy)}"}
    if loss is not None:
        changes |= {"loss": loss, "source_sha256": source_sha256(loss, "loss")}
    return _again(UpdateJob.model_validate(policy.job), changes | {"snapshot_output": None})


def version_of(manifest: Manifest) -> str:
    """Last part of an artifact's URI, such as v0003."""
    return manifest.uri.rpartition("/")[2]


def _again(job: AnyJob, changes: dict[str, object]) -> AnyJob:
    return job.model_copy(update={"injected": None} | changes)


def _change(settings: dict, name: str, value: JsonValue) -> None:
    *path, last = name.split(".")
    owner = settings
    for part in path:
        owner = owner.get(part, {}) if isinstance(owner, dict) else {}
    if not isinstance(owner, dict) or (last not in owner and path[-1:] != ["kwargs"] and path[-1:] != ["overrides"]):
        raise ValueError(
            f"changes names {name}, which is no setting; settings here: {', '.join(sorted(owner)) or 'none'}"
        )
    owner[last] = value
