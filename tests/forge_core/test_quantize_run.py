"""The jobs of a quantization: which rollouts it takes, and what a training run's last step inherits."""

from __future__ import annotations

from pathlib import Path

from forge_core.artifacts import Ref, read_manifest
from forge_core.plan import Plan
from forge_core.quantize_config import QuantizeConfig, QuantizeGatesConfig, SchemeConfig
from forge_core.quantize_run import QatConfig, QuantizePlan, last_step_config, num_sequences, stored_rollouts
from tests.pipeline import tiny_config
from tests.stored_runs import store_run


def ref(plan: Plan, name: str) -> Ref:
    manifest = read_manifest(f"{plan.run_uri}/{name}")
    assert manifest is not None
    return manifest.ref


def test_stored_rollouts_are_those_of_the_very_policy(tmp_path: Path):
    plan = store_run(tiny_config(str(tmp_path)), "run")
    assert stored_rollouts(ref(plan, "policies/v0002")) == [ref(plan, "rollouts/v0002")]
    assert num_sequences([ref(plan, "rollouts/v0002")]) == 8 * 4
    assert stored_rollouts(ref(plan, "policies/v0004")) == []  # the last one was never sampled from


def test_a_last_step_takes_prompts_root_and_engine_of_its_run(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    assert last_step_config(config) is None
    scheme = QuantizeConfig(scheme=SchemeConfig(name="fp8"))
    asked = config.model_copy(update={"quantize": scheme, "quantize_gates": QuantizeGatesConfig(max_mae=0.5)})
    found = last_step_config(asked)
    assert found is not None
    assert (found.quantize, found.quantize_gates.max_mae, found.root) == (scheme, 0.5, config.root)
    assert (found.data.dataset, found.data.group_size) == (config.grpo.dataset, config.grpo.group_size)
    assert found.generator == config.generator


def test_training_takes_a_tenth_of_the_steps_at_a_tenth_of_the_rate_and_makes_the_next_version(tmp_path: Path):
    config = tiny_config(str(tmp_path))
    plan = store_run(config, "run")
    asked = last_step_config(config.model_copy(update={"quantize": QuantizeConfig()}))
    assert asked is not None
    jobs = QuantizePlan(plan, asked.model_copy(update={"qat": QatConfig(sft=config.sft)}))
    job = jobs.qat(ref(plan, "policies/v0004"), rollouts=[ref(plan, "rollouts/v0003")], dataset=None)
    assert job.output == f"{plan.run_uri}/policies/v0005"
    assert (job.num_steps, job.optimizer.learning_rate) == (2, 0.1 * 3e-3)  # 20 steps at 3e-3
