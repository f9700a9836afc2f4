"""What a nightly run starts from, and whether there is anything new for it to do.

{root}/published/{name}/nightly.json    data and settings of the last night that went to its end
"""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import Field, ValidationError

from forge_core import publication, storage
from forge_core.artifacts import ArtifactError, sha256_json
from forge_core.config import PostTrainConfig
from forge_core.operation import NotifyConfig, RetentionConfig, TimeLimitsConfig, WarmthConfig
from forge_core.placement_config import PlacementConfig
from forge_core.plan import Plan
from forge_core.runs import is_run, read_run
from forge_core.settings import Settings

# Settings that say how and where a run is done, and the policy, which is another one every night.
_NO_REASON_TO_TRAIN = {
    "policy": None,
    "keep_warm": WarmthConfig().model_dump(mode="json"),
    "time_limits": TimeLimitsConfig().model_dump(mode="json"),
    "placement": PlacementConfig().model_dump(mode="json"),
    "retention": RetentionConfig().model_dump(mode="json"),
    "reuse_from": None,
    "notify": NotifyConfig().model_dump(mode="json"),
}


class NightlyRecord(Settings):
    """What stands in `nightly.json`."""

    run_id: str
    data: dict[str, str] = Field(description="Digest of each dataset it learned from")
    settings_sha256: str
    finished_at: str


def from_champion(config: PostTrainConfig, run_id: str) -> PostTrainConfig:
    """The config with the champion as its starting policy; as it is when nothing was published yet.

    A night that was begun before keeps the policy it began with: it may itself have become the champion.
    """
    run_uri = f"{storage.absolute_uri(config.root)}/{run_id}"
    if is_run(run_uri):
        policy = read_run(run_uri).settings().policy
    elif (champion := publication.champion(config.root, config.name)) is not None:
        policy = config.policy.model_copy(update={"uri": champion.policy.uri})
    else:
        policy = config.policy
    return config.model_copy(update={"policy": policy})


def reason_to_skip(plan: Plan, data: dict[str, str]) -> str | None:
    """Why this night has nothing to do, None when it has: it was not begun, and data or settings are new."""
    last = _last(plan)
    if last is None or (last.run_id != plan.run_id and is_run(plan.run_uri)):
        return None
    if last.data == data and last.settings_sha256 == _settings_sha256(plan):
        return f"nothing new: {last.run_id} has learned from the same data with the same settings"
    return None


def record(plan: Plan, data: dict[str, str]) -> None:
    """Record that a night went to its end, whether its policy was published or not."""
    content = NightlyRecord(
        run_id=plan.run_id,
        data=data,
        settings_sha256=_settings_sha256(plan),
        finished_at=datetime.now(UTC).isoformat(),
    )
    storage.write_atomic(_uri(plan), content.model_dump_json(indent=1).encode())


def _last(plan: Plan) -> NightlyRecord | None:
    try:
        return NightlyRecord.model_validate_json(storage.read_bytes(_uri(plan)))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ArtifactError(f"{_uri(plan)} is no record of a night; delete it to train once more") from error


def _settings_sha256(plan: Plan) -> str:
    return sha256_json(plan.config.model_dump(mode="json") | _NO_REASON_TO_TRAIN)


def _uri(plan: Plan) -> str:
    return f"{publication.published_uri(plan.config.root, plan.config.name)}/nightly.json"
