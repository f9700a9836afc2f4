"""The record of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.config import DpoRunConfig, GrpoRunConfig, PostTrainConfig, RunConfig, SftRunConfig
from forge_core.quantize_run import QuantizeRunConfig
from forge_core.runs import read_run, write_run

RECIPES = (RunConfig, SftRunConfig, DpoRunConfig, GrpoRunConfig, PostTrainConfig, QuantizeRunConfig)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_the_settings_of_every_kind_of_run_are_read_back_as_they_were(recipe: type[RunConfig], tmp_path: Path):
    config = recipe(seed=7)
    write_run(str(tmp_path), "run", config)
    assert read_run(str(tmp_path)).settings() == config
