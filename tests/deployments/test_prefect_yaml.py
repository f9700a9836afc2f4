"""prefect.yaml means what it says: Prefect drops unknown keys without a word, so they are refused here."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from prefect.cli.deploy._models import DeploymentConfig
from prefect.flows import load_flow_from_entrypoint

REPO = Path(__file__).parent.parent.parent
DEPLOYMENTS = yaml.safe_load((REPO / "prefect.yaml").read_text())["deployments"]
EXPECTED = {
    "dpo/default",
    "reward-model/default",
    "drill/default",
    "drill/soak",
    "branch/default",
    "rescore/default",
    "redo-update/default",
    "replay/default",
    "post-train/quickstart",
    "post-train/smollm2",
    "nightly/nightly",
    "sft/default",
    "grpo/default",
    "evaluate/default",
    "quantize/default",
    "serve/quickstart",
}


def test_every_deployment_is_there():
    names = {f"{load_flow_from_entrypoint(item['entrypoint']).name}/{item['name']}" for item in DEPLOYMENTS}
    assert names == EXPECTED


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: f"{item['entrypoint']}-{item['name']}")
def test_a_deployment_has_only_keys_that_prefect_reads(deployment: dict):
    assert set(deployment) <= set(DeploymentConfig.model_fields)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: f"{item['entrypoint']}-{item['name']}")
def test_the_parameters_of_a_deployment_pass_its_flows_validation(deployment: dict):
    if deployment["parameters"] == {}:  # works on a run that the user names
        return
    [step] = deployment["build"]
    path = step["forge_core.config.read_yaml"]["path"]
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    flow.validate_parameters({"config": yaml.safe_load((REPO / path).read_text())})
