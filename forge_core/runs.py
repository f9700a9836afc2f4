"""The record of a run: with which settings it was started, so that it can be branched, re-scored and replayed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import JsonValue

from forge_core import config as configs
from forge_core import storage
from forge_core.artifacts import ArtifactError
from forge_core.config import RunConfig
from forge_core.quantize_run import QuantizeRunConfig
from forge_core.settings import Settings


class RunRecord(Settings):
    """What stands in `{root}/{run_id}/run.json`: the settings it was last started with."""

    run_id: str
    recipe: Literal[
        "RunConfig",
        "SftRunConfig",
        "DpoRunConfig",
        "RewardModelRunConfig",
        "GrpoRunConfig",
        "PostTrainConfig",
        "QuantizeRunConfig",
    ]
    config: dict[str, JsonValue]
    started_at: str

    def settings(self) -> RunConfig:
        """The config as the model it was written from."""
        recipes = {"QuantizeRunConfig": QuantizeRunConfig}
        return (recipes.get(self.recipe) or getattr(configs, self.recipe)).model_validate(self.config)


def write_run(run_uri: str, run_id: str, config: RunConfig) -> None:
    """Record the settings of a run; started again, it is recorded again."""
    record = RunRecord.model_validate(
        {
            "run_id": run_id,
            "recipe": type(config).__name__,
            "config": config.model_dump(mode="json"),
            "started_at": datetime.now(UTC).isoformat(),
        }
    )
    storage.write_atomic(f"{run_uri}/run.json", record.model_dump_json(indent=1).encode())


def read_run(run_uri: str) -> RunRecord:
    """The record of a run; raises ArtifactError when there is none."""
    try:
        return RunRecord.model_validate_json(storage.read_bytes(f"{run_uri}/run.json"))
    except FileNotFoundError as error:
        raise ArtifactError(f"{run_uri} has no run.json; give the URI of a run, {{root}}/{{run_id}}") from error


def is_run(uri: str) -> bool:
    """Whether this is the prefix of a run."""
    return storage.exists(f"{uri}/run.json")
