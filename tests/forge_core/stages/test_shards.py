"""Rollouts in parts, in a real generator: the same set, and a lost part is sampled again alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from forge_core.artifacts import resolve
from forge_core.faults import Fault, FaultPlan
from forge_core.operation import WarmthConfig
from forge_core.placement_config import PlacementConfig
from forge_core.plan import Plan
from tasks.processes import stage_processes
from tests.pipeline import events, tiny_config, with_retries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_rollout_in_three_parts_of_which_one_was_lost_is_that_of_one_generator(tmp_path: Path):
    lost = Fault(job="rollout v0001-01-of-03", action="kill", at="work")
    config = tiny_config(
        str(tmp_path),
        keep_warm=WarmthConfig(trainer=False, reference=False),
        placement=PlacementConfig(rollout_shards=3),
        fault_plan=FaultPlan(faults=(lost,)),
    )
    with stage_processes(config, logging.getLogger("shards")) as processes:
        plan, run = Plan(config, "run"), with_retries(processes)
        job = plan.rollout(run(plan.start()), run(plan.dataset(config.grpo.dataset)), 0)
        merged = resolve(run(job))
        whole = processes.warm("generator").run(job.model_copy(update={"output": f"{plan.run_uri}/rollouts/whole"}))
    assert merged.digest == whole.digest  # 8 prompts in parts of 2, 3 and 3
    attempts = [event["job"] for event in events(config, "attempt") if "-of-" in event["job"]]
    assert sorted(attempts) == [f"rollout v0001-0{part}-of-03" for part in (0, 1, 1, 2)]
    assert list(merged.inputs) == ["policy", "dataset", "shards", "shards_1", "shards_2"]
    parts = [resolve(ref) for name, ref in merged.inputs.items() if name.startswith("shards")]
    sizes = [sum(file.num_bytes for file in part.files) for part in parts]
    assert [merged.summary[f"shards/0{part}/bytes"] for part in range(3)] == sizes
