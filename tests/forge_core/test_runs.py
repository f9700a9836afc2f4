"""The record of a run: whatever a flow is started with comes back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core import config as configs
from forge_core.config import RunConfig
from forge_core.quantize_run import QuantizeRunConfig
from forge_core.runs import read_run, write_run

MODELS = [value for value in vars(configs).values() if isinstance(value, type) and issubclass(value, RunConfig)]


@pytest.mark.parametrize("model", [*MODELS, QuantizeRunConfig], ids=lambda model: model.__name__)
def test_settings_of_every_flow_are_recorded(model: type[RunConfig], tmp_path: Path):
    needed = {"run": str(tmp_path)} if "run" in model.model_fields else {}
    settings = model.model_validate({"name": "mine", "seed": 3} | needed)
    write_run(tmp_path.as_uri(), "run", settings)
    assert read_run(tmp_path.as_uri()).settings() == settings
