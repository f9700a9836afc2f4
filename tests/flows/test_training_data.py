"""A run whose training data holds what it is evaluated on."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.local_service import Service
from flows.sft import sft
from forge_core import storage
from forge_core.config import EvalConfig, SftRunConfig
from forge_core.data_config import DatasetConfig, OverlapConfig
from forge_core.fit_config import SftConfig
from forge_core.plan import Plan
from tests.pipeline import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_that_would_learn_its_evaluation_by_heart_stops_before_it_has_learned(
    prefect_server: Service, mlflow_server: Service, tmp_path: Path
):
    tiny = tiny_config(str(tmp_path))
    sums = DatasetConfig(fn="arithmetic", kwargs={"max_number": 9})
    config = SftRunConfig(
        root=str(tmp_path),
        policy=tiny.policy,
        trainer=tiny.trainer,
        generator=tiny.generator,
        sft=SftConfig(dataset=sums, num_steps=1),
        evals=(EvalConfig(name="same", dataset=sums, num_examples=20),),
        overlap=OverlapConfig(max_fraction=0.5),
    )
    message = r"20 problems of the evaluation same are in the training data arithmetic.* overlap.max_fraction is 0.5"
    with pytest.raises(ValueError, match=message):
        sft(config, run_id="run")
    assert not storage.exists(f"{Plan(config, 'run').run_uri}/policies/v0001/manifest.json")
