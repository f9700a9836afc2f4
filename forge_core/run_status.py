"""What a run has done so far, read back from its manifests alone: its iterations, evaluations and the last commit."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from forge_core import storage
from forge_core.artifacts import ArtifactError, Manifest
from forge_core.config import GrpoRunConfig
from forge_core.manifests import ManifestReader
from forge_core.plan import Plan
from forge_core.runs import read_run
from forge_core.settings import Settings

# Columns of a table of iterations, by title: the metric, and how it is written.
COLUMNS = {
    "reward": ("reward/mean", ".3f"),
    "length": ("completion/length/mean", ".1f"),
    "truncated": ("completion/truncated_fraction", ".1%"),
    "groups to learn from": ("groups/informative", ".0f"),
    "entropy": ("entropy/mean", ".3f"),
    "clipped": ("loss/clip_fraction", ".1%"),
    "KL to reference": ("kl/reference", ".4f"),
    "log-prob gap": ("logprob_gap/mean", ".4f"),
    "gradient norm": ("grad_norm/total", ".2f"),
    "seconds": ("time/iteration_seconds", ".1f"),
}


class RunStatus(Settings):
    """A run as its committed artifacts tell it."""

    run_uri: str
    name: str
    started_at: str
    last_commit_at: str | None = Field(description="When it last committed an artifact, None before the first")
    last_artifact: str | None = Field(description="Which one, relative to the run")
    first_version: int = Field(description="The policy version that the first iteration starts from")
    num_iterations: int = Field(description="GRPO iterations in all, 0 when the run has none")
    iterations: tuple[dict[str, float | int], ...] = Field(
        description="Metrics of each iteration under their tracking names; the last one may be half done"
    )
    evaluations: dict[str, dict[str, float | int]] = Field(description="Metrics by policy version and evaluation")

    @property
    def num_done(self) -> int:
        """Iterations whose update is committed."""
        return sum("grad_norm/total" in numbers for numbers in self.iterations)

    @property
    def is_done(self) -> bool:
        """Whether every iteration is done and the policy that came out is evaluated."""
        last = f"v{self.first_version + self.num_iterations:04d}/"
        return self.num_done >= self.num_iterations and any(name.startswith(last) for name in self.evaluations)


def run_status(run_uri: str) -> RunStatus:
    """The state of a run; raises ArtifactError when there is no such run."""
    run_uri = storage.absolute_uri(run_uri)
    record = read_run(run_uri)
    plan = Plan(record.settings(), record.run_id)
    reader = ManifestReader()
    grpo = plan.grpo_config if isinstance(plan.config, GrpoRunConfig) else None
    names = {
        iteration: (f"rollouts/v{version:04d}", f"scored/v{version:04d}", f"policies/v{version + 1:04d}")
        for iteration, version in ((i, plan.version(i)) for i in range(grpo.num_iterations if grpo else 0))
    }
    evals = _evaluation_names(run_uri)
    policies = [f"policies/{name}" for name in storage.list_names(f"{run_uri}/policies")]
    reader.read(f"{run_uri}/{name}" for name in (*(n for group in names.values() for n in group), *evals, *policies))
    found: list[Manifest] = []

    def manifest(name: str) -> Manifest | None:
        one = reader.get(f"{run_uri}/{name}")
        if isinstance(one, ArtifactError):
            raise one
        if one is not None:
            found.append(one)
        return one

    iterations = []
    for group in names.values():
        made = [one for one in map(manifest, group) if one is not None]
        if not made:
            break
        iterations.append(_numbers(made))
    evaluations = {name.removeprefix("evals/"): one.summary for name in evals if (one := manifest(name)) is not None}
    for name in policies:
        manifest(name)
    last = max(found, key=lambda one: datetime.fromisoformat(one.created_at), default=None)
    return RunStatus(
        run_uri=run_uri,
        name=plan.config.name,
        started_at=record.started_at,
        last_commit_at=last.created_at if last else None,
        last_artifact=last.uri.removeprefix(f"{run_uri}/") if last else None,
        num_iterations=len(names),
        iterations=tuple(iterations),
        evaluations=evaluations,
        first_version=plan.version(0),
    )


def _evaluation_names(run_uri: str) -> list[str]:
    return [
        f"evals/{version}/{name}"
        for version in storage.list_names(f"{run_uri}/evals")
        for name in storage.list_names(f"{run_uri}/evals/{version}")
    ]


def _numbers(manifests: list[Manifest]) -> dict[str, float | int]:
    numbers: dict[str, float | int] = {}
    for one in manifests:
        numbers |= one.summary | {f"time/{one.job['stage']}_seconds": sum(one.timings.values())}
    return numbers | {"time/iteration_seconds": sum(sum(one.timings.values()) for one in manifests)}
