"""Rollouts of a rounded policy: reproducible, near those of the policy itself, and corrected in its update."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge_core.artifacts import Ref, resolve
from forge_core.config import GeneratorConfig, GrpoConfig, RewardConfig
from forge_core.plan import Plan
from forge_core.quantize_config import SchemeConfig
from forge_core.update_config import CorrectionConfig
from tasks.processes import stage_processes
from tests.pipeline import in_processes, tiny_config

TRUNCATED = CorrectionConfig(method="truncate", high=2.0)


def test_rounded_rollouts_need_a_correction():
    with pytest.raises(ValueError, match=r"quantized_rollouts is fp8 and correction is unset"):
        GrpoConfig(quantized_rollouts=SchemeConfig(name="fp8"))


def test_rounded_rollouts_cannot_wait_for_a_calibration():
    with pytest.raises(ValueError, match=r"w8a8_static, which is calibrated"):
        GrpoConfig(proximal="trainer", correction=TRUNCATED, quantized_rollouts=SchemeConfig(name="w8a8_static"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scheme", "dtype"), [("w8a8_dynamic", "float32"), ("w4a16", "bfloat16")])
def test_a_run_samples_from_the_rounded_policy_and_trains_the_one_it_was_rounded_from(
    scheme: str, dtype: str, tmp_path: Path
):
    """int8 takes a new engine for each policy, int4 loads the next weights into the same one."""
    tiny = tiny_config(str(tmp_path / "store"))
    grpo = tiny.grpo.model_copy(
        update={
            "proximal": "trainer",
            "correction": TRUNCATED,
            "rewards": (RewardConfig(fn="length", kwargs={"limit": 200}),),
            "quantized_rollouts": SchemeConfig(name=scheme, **({"group_size": 32} if scheme == "w4a16" else {})),
        }
    )
    generator = GeneratorConfig(**tiny.generator.model_dump() | {"dtype": dtype})
    config = tiny.model_copy(update={"grpo": grpo, "generator": generator})
    plan = Plan(config, "rounded")
    with stage_processes(config, logging.getLogger("rounded")) as processes:
        run = in_processes(processes)
        policy, problems = run(plan.start()), run(plan.dataset(grpo.dataset))
        sampled: list[Ref] = []
        for iteration in range(2):
            sampled.append(run(plan.rollout(policy, problems, iteration)))
            policy = run(plan.update(policy, [run(plan.score(sampled[-1], iteration))], iteration))
        again = Plan(config, "again").rollout(resolve(sampled[1]).inputs["policy"], problems, 1)
        processes.close()
        repeated = in_processes(processes)(again)  # in a cold process
    assert repeated.digest == sampled[1].digest
    summary = resolve(policy).summary
    assert 0 < summary["kl/mismatch"] < 0.05
    assert 0.9 < summary["correction/mean"] < 1.1
