"""A whole run without Prefect: the same jobs in the same stage processes, for tests of what they publish."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from forge_core import storage
from forge_core.artifacts import Manifest, Ref, read_manifest
from forge_core.config import PostTrainConfig, load_config
from forge_core.jobs import StageJob
from forge_core.operation import WarmthConfig
from forge_core.plan import Plan
from forge_core.stages.process import StageError
from forge_core.stages.workspace import committed
from tasks.processes import StageProcesses, stage_processes

TINY = Path(__file__).parent.parent / "deployments" / "configs" / "tiny.yaml"
COLD = WarmthConfig(trainer=False, generator=False, scorer=False, reference=False)
Run = Callable[[StageJob], Ref]


def tiny_config(root: str, **changes) -> PostTrainConfig:
    """The smoke-test recipe with its artifacts under `root`."""
    return load_config(TINY, PostTrainConfig).model_copy(update={"root": root} | changes)


def run_pipeline(config: PostTrainConfig, run_id: str, run: Run | None = None) -> list[Manifest]:
    """All policy versions of a run, oldest first; `run` replaces the stage processes of this config."""
    with stage_processes(config, logging.getLogger("pipeline")) as processes:
        plan = Plan(config, run_id)
        steps(plan, run or with_retries(processes))
        return policies(plan)


def in_processes(processes: StageProcesses) -> Run:
    """Jobs run in stage processes unless their output is committed."""

    def run(job: StageJob) -> Ref:
        return (committed(job) or processes.run(job)).ref

    return run


def with_retries(processes: StageProcesses) -> Run:
    """Jobs run like that, and again as long as the class of their failure allows; without the waits in between."""

    def run(job: StageJob) -> Ref:
        while True:
            with contextlib.suppress(StageError):
                return in_processes(processes)(job)

    return run


def steps(plan: Plan, run: Run) -> None:
    """What flows/post_train.py does, evaluation and publication apart."""
    sft, grpo = plan.sft_config, plan.grpo_config
    assert sft is not None
    assert grpo is not None
    policy = run(plan.start())
    policy = run(plan.sft(policy, run(plan.dataset(sft.dataset))))
    problems, reference = run(plan.dataset(grpo.dataset)), policy
    for iteration in range(grpo.num_iterations):
        rollouts = run(plan.rollout(policy, problems, iteration))
        compared = run(plan.reference(reference, rollouts, iteration)) if grpo.kl is not None else None
        scored = run(plan.score(rollouts, iteration, reference_logprobs=compared))
        policy = run(plan.update(policy, [scored], iteration))


def policies(plan: Plan) -> list[Manifest]:
    """The committed policy versions of a run, oldest first."""
    found: list[Manifest] = []
    while (manifest := read_manifest(f"{plan.run_uri}/policies/v{len(found):04d}")) is not None:
        found.append(manifest)
    return found


def weights_sha256(manifests: list[Manifest]) -> list[str]:
    """SHA-256 of the weights of each policy version."""
    return [file.sha256 for manifest in manifests for file in manifest.files if file.path.endswith(".safetensors")]


def events(config: PostTrainConfig, kind: str, run_id: str = "run") -> list[dict]:
    """What a run under a fault plan recorded: its attempts or its replays, in order."""
    prefix = f"{Plan(config, run_id).run_uri}/drill/events"
    found = [json.loads(storage.read_bytes(f"{prefix}/{name}")) for name in storage.list_names(prefix)]
    return [event for event in found if event["event"] == kind]
