"""The whole quantization flow on a tiny policy: publication, refusal, rollback, damage."""

from __future__ import annotations

import json

import pytest
from mlflow import MlflowClient

from deployments.local_service import Service
from flows.quantize import QuantizationRefusedError, quantize
from forge_core import artifacts, publication, storage
from forge_core.artifacts import ArtifactError, Manifest, read_manifest
from forge_core.config import PolicyConfig, SamplingConfig
from forge_core.operation import WarmthConfig
from forge_core.plan import Plan
from forge_core.quantize_config import CalibrationConfig, QuantizeConfig, QuantizeGatesConfig, SchemeConfig
from forge_core.quantize_run import CalibrationDataConfig, QatConfig, QuantizeRunConfig, SpeedConfig
from tests.pipeline import tiny_config

TINY = tiny_config("")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def published(
    prefect_server: Service, mlflow_server: Service, tmp_path_factory: pytest.TempPathFactory
) -> QuantizeRunConfig:
    """The config of a finished run called `first`, whose quantized policy is published."""
    tiny = TINY
    config = QuantizeRunConfig(
        name="tiny",
        root=str(tmp_path_factory.mktemp("store")),
        policy=tiny.policy,
        evals=tiny.evals,
        generator=tiny.generator,
        trainer=tiny.trainer,
        keep_warm=WarmthConfig(trainer=False, reference=False),
        quantize=QuantizeConfig(
            scheme=SchemeConfig(name="w8a8_static", symmetric_activations=False),
            calibration=CalibrationConfig(num_samples=128, num_heldout=16),
        ),
        data=CalibrationDataConfig(dataset=tiny.grpo.dataset, sampling=SamplingConfig(max_tokens=4)),
        speed=SpeedConfig(num_rounds=2, num_prompts=8, max_tokens=4),
    )
    metrics = quantize(config, run_id="first")
    assert metrics["quantize/size_ratio"] > 2
    assert metrics["quantize/speed_ratio"] > 0
    assert metrics["quantize/accuracy/heldout/drop"] <= 0.02
    return config


def quantized(config: QuantizeRunConfig, run_id: str) -> Manifest:
    found = read_manifest(f"{Plan(config, run_id).run_uri}/quantized/v0000-w8a8_static")
    assert found is not None
    return found


def test_what_passes_its_gates_is_published_and_a_second_run_of_it_makes_nothing_new(published: QuantizeRunConfig):
    current = publication.champion(published.root, "tiny-quantized")
    assert current is not None
    made = quantized(published, "first")
    assert current.policy == made.ref
    assert {result.gate for result in current.gates} == {"max_mae", "max_accuracy_drop/heldout"}
    assert MlflowClient().get_model_version_by_alias("tiny", "quantized").source.endswith(made.attempt)
    files = {record.path for record in made.files}
    assert {"config.json", "calibration/statistics.safetensors", "layers.json", "layers.png", "report.md"} <= files
    assert set(made.inputs) == {"policy", "rollouts"}
    quantize(published, run_id="first")
    assert quantized(published, "first") == made


def test_another_run_compares_calibrations_and_a_failed_gate_publishes_nothing(published: QuantizeRunConfig):
    before = publication.champion(published.root, "tiny-quantized")
    first = Plan(published, "first").run_uri
    strict = published.model_copy(
        update={
            "policy": PolicyConfig(uri=f"{first}/policies/v0000"),
            "quantize_gates": QuantizeGatesConfig(max_mae=1e-9),
            "speed": SpeedConfig(num_rounds=0),
            "qat": QatConfig(sft=TINY.sft),
        }
    )
    with pytest.raises(
        QuantizationRefusedError,
        match=r"quantize/mae is .*, above 1e-09; after quantization-aware training quantize/mae is",
    ):
        quantize(strict, run_id="second")
    assert publication.champion(published.root, "tiny-quantized") == before
    trained = read_manifest(f"{Plan(strict, 'second').run_uri}/policies/v0001")
    assert trained is not None
    assert trained.summary["qat/steps"] == 2
    assert trained.summary["qat/layers"] == 14
    made = quantized(published, "second")
    # The policy is a copy of the first run's, so its stored rollouts serve again: the same calibration, no drift.
    assert made.inputs["rollouts"].uri == f"{first}/rollouts/v0000"
    assert made.inputs["previous"] == quantized(published, "first").ref
    assert made.summary["quantize/zero_point_drift/max"] == 0
    weights = [{file.sha256 for file in one.files if file.path.endswith(".safetensors")}
               for one in (made, quantized(published, "first"))]  # fmt: skip
    assert weights[0] == weights[1]


def test_an_edited_quantized_artifact_is_refused(published: QuantizeRunConfig, tmp_path):
    made = quantized(published, "first")
    place = storage.local_path(f"{made.files_uri}/config.json")
    assert place is not None
    honest = place.read_text()
    config = json.loads(honest)
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    place.write_text(json.dumps(config))
    try:
        with pytest.raises(ArtifactError, match=r"config.json does not have the SHA-256"):
            artifacts.fetch(made.ref, tmp_path)
    finally:
        place.write_text(honest)
