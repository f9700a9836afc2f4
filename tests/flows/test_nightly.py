"""Two nights: the first trains a fresh policy, the second finds nothing new."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.local_service import Service
from flows.nightly import nightly
from forge_core import publication
from forge_core.manifests import find
from tests.pipeline import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_night_publishes_and_the_next_one_finds_nothing_new(
    prefect_server: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # MLflow's local file
    config = tiny_config(str(tmp_path), name="nights")
    config = config.model_copy(
        update={
            "sft": config.sft.model_copy(update={"num_steps": 2}),
            "grpo": config.grpo.model_copy(update={"num_iterations": 0}),
        }
    )
    first = nightly(config, run_id="first", return_state=True)
    assert first.name == "Completed"
    assert first.result()["eval/heldout/num_examples"] == 20
    champion = publication.champion(config.root, "nights")
    assert champion is not None
    assert champion.policy == find(f"{config.root}/first")

    second = nightly(config, run_id="second", return_state=True)
    assert (second.type.value, second.name) == ("COMPLETED", "Skipped")
    assert second.message == "nothing new: first has learned from the same data with the same settings"
    assert publication.champion(config.root, "nights") == champion
