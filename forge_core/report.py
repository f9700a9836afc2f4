"""What a finished run achieved and where its time went, read back from its manifests."""

from __future__ import annotations

import itertools
from datetime import datetime

from pydantic import Field

from forge_core.artifacts import Manifest, read_manifest
from forge_core.plan import Plan
from forge_core.settings import Settings

# The phase of each stage that is the work itself; loading, exporting and uploading are not.
WORK_PHASE = {
    "start": "start",
    "sft": "sft",
    "dpo": "dpo",
    "reward_model": "reward_model",
    "rollout": "generate",
    "reference": "reference",
    "score": "score",
    "update": "update",
    "evaluate": "generate",
}


class RunReport(Settings):
    """Figures of one run."""

    seed: int
    accuracy: dict[str, float] = Field(description="Greedy accuracy of the first evaluation: base, sft, grpo")
    pass_at_k: dict[str, float] = Field(description="pass@k of the first evaluation: base, sft, grpo")
    stage_seconds: dict[str, float] = Field(description="Seconds inside the stage processes, by stage")
    tokens_per_second: dict[str, float] = Field(description="Median throughput by stage")
    outside_fraction: float = Field(
        description="Share of the GRPO iterations' wall time outside generate, score, update"
    )
    iteration_seconds: float = Field(description="Mean wall time of a GRPO iteration")
    rewards: tuple[float, ...] = Field(description="Mean reward of each GRPO iteration")


def report(plan: Plan) -> RunReport:
    """The figures of a run from its committed artifacts; whatever stage the run has not reached is left out."""
    evals = {
        label: _manifest(plan, f"evals/v{version:04d}/{plan.config.evals[0].name}")
        for label, version in _versions(plan).items()
    }
    name = plan.config.evals[0].name
    accuracy = {label: found.summary[f"eval/{name}/accuracy"] for label, found in evals.items() if found}
    k = plan.config.evals[0].pass_k
    pass_at_k = {label: found.summary[f"eval/{name}/pass_at_{k}_of_{k}"] for label, found in evals.items() if found}
    iterations = _iterations(plan)
    made = [
        *evals.values(),
        *(_manifest(plan, f"policies/v{version:04d}") for version in (0, 1)),
        *itertools.chain.from_iterable(iterations),
    ]
    seconds: dict[str, float] = {}
    speeds: dict[str, list[float]] = {}
    for manifest in {found.uri: found for found in made if found}.values():
        stage = str(manifest.job["stage"])
        seconds[stage] = seconds.get(stage, 0.0) + sum(manifest.timings.values())
        if (speed := manifest.summary.get(f"tokens_per_second/{stage}")) is not None:
            speeds.setdefault(stage, []).append(speed)
    outside, wall = _outside(iterations)
    return RunReport(
        seed=plan.config.seed,
        accuracy=accuracy,
        pass_at_k=pass_at_k,
        stage_seconds=seconds,
        tokens_per_second={stage: sorted(values)[len(values) // 2] for stage, values in speeds.items()},
        outside_fraction=outside,
        iteration_seconds=wall,
        rewards=tuple(scored.summary["reward/mean"] for _, scored, _ in iterations),
    )


def _versions(plan: Plan) -> dict[str, int]:
    versions = {"base": 0}
    if plan.sft_config is not None:
        versions["sft"] = 1
    if plan.grpo_config is not None:
        versions["grpo"] = plan.version(plan.grpo_config.num_iterations)
    return versions


def _iterations(plan: Plan) -> list[list[Manifest]]:
    """Rollout, score and update manifests of each complete GRPO iteration."""
    found = []
    for iteration in range(plan.grpo_config.num_iterations if plan.grpo_config else 0):
        version = plan.version(iteration)
        names = (f"rollouts/v{version:04d}", f"scored/v{version:04d}", f"policies/v{version + 1:04d}")
        manifests = [_manifest(plan, name) for name in names]
        found.append([manifest for manifest in manifests if manifest is not None])
    return [manifests for manifests in found if len(manifests) == 3]


def _outside(iterations: list[list[Manifest]]) -> tuple[float, float]:
    """Share of wall time outside the work phases, and mean wall time, from one update's commit to the next one's."""
    if len(iterations) < 2:
        return 0.0, 0.0
    ends = [datetime.fromisoformat(update.created_at).timestamp() for _, _, update in iterations]
    work = sum(
        manifest.timings.get(WORK_PHASE[str(manifest.job["stage"])], 0.0)  # 0 for what was taken over from another run
        for iteration in iterations[1:]
        for manifest in iteration
    )
    wall = ends[-1] - ends[0]
    return 1 - work / wall, wall / (len(iterations) - 1)


def _manifest(plan: Plan, name: str) -> Manifest | None:
    return read_manifest(f"{plan.run_uri}/{name}")
