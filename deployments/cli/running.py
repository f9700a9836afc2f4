"""`forge run`: the flow that a config asks for, here or on a worker."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import yaml

from forge_core.config import (
    DpoRunConfig,
    GrpoRunConfig,
    PostTrainConfig,
    RewardModelRunConfig,
    RunConfig,
    SftRunConfig,
    load_config,
)

# By the sections that a config has.
_RECIPES: dict[frozenset[str], type[RunConfig]] = {
    frozenset({"sft", "grpo"}): PostTrainConfig,
    frozenset({"sft"}): SftRunConfig,
    frozenset({"grpo"}): GrpoRunConfig,
    frozenset({"dpo"}): DpoRunConfig,
    frozenset({"reward_model"}): RewardModelRunConfig,
    frozenset(): RunConfig,
}


def recipe_of(path: Path) -> type[RunConfig]:
    """The config model of a YAML file, by which of the sections `sft`, `grpo`, `dpo` and `reward_model` it has."""
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot load config {path}: {error}") from error
    sections = {"sft", "grpo", "dpo", "reward_model"} & content.keys()
    if (recipe := _RECIPES.get(frozenset(sections))) is None:
        raise ValueError(f"config {path} has the sections {', '.join(sorted(sections))}; no flow takes them together")
    return recipe


def run_config(path: Path, *, run_id: str | None, seed: int | None, deployment: str | None) -> None:
    """Run a config; the process ends with an error when the flow does."""
    config = load_config(path, recipe_of(path))
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
    if deployment is not None:
        _on_a_worker(config, run_id, deployment)
        return
    from flows.dpo import dpo
    from flows.evaluate import evaluate
    from flows.grpo import grpo
    from flows.post_train import post_train
    from flows.reward_model import reward_model
    from flows.sft import sft

    match config:
        case PostTrainConfig():
            post_train(config, run_id=run_id)
        case SftRunConfig():
            sft(config, run_id=run_id)
        case GrpoRunConfig():
            grpo(config, run_id=run_id)
        case DpoRunConfig():
            dpo(config, run_id=run_id)
        case RewardModelRunConfig():
            reward_model(config, run_id=run_id)
        case _:
            evaluate(config, run_id=run_id)


def _on_a_worker(config: RunConfig, run_id: str | None, deployment: str) -> None:
    from deployments.runs import follow, say, start_run

    started = time.monotonic()
    named = {"run_id": run_id} if run_id else {}
    flow_run = start_run(deployment, {"config": config.model_dump(mode="json"), **named})
    say(started, f"flow run {flow_run.name} {flow_run.id}")
    final = follow(flow_run, started)
    if not final.state or not final.state.is_completed():
        sys.exit(f"forge: the run ended as {final.state_name}: {final.state.message if final.state else ''}")
