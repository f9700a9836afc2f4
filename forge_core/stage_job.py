"""What every job of a stage has, and its digest."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from forge_core.artifacts import Kind, Ref, sha256_json
from forge_core.faults import JobFaults
from forge_core.settings import Settings
from forge_core.software import software_versions

Role = Literal["trainer", "generator", "scorer", "reference"]

# Bump a stage's number when its code changes what it computes: outputs of older code then count as another job.
STAGE_VERSIONS = {
    "dataset": 1,
    "overlap": 1,
    "start": 1,
    "sft": 3,
    "dpo": 1,
    "reward_model": 1,
    "rollout": 2,
    "merge": 1,
    "reference": 1,
    "score": 3,
    "update": 2,
    "evaluate": 2,
    "quantize": 1,
    "speed": 1,
    "qat": 1,
}


class StageJob(Settings):
    """What every job has. Its digest covers all that decides the result, and nothing else."""

    role: ClassVar[Role]
    kind: ClassVar[Kind]
    packages: ClassVar[tuple[str, ...]] = ()
    # Fields that say where and how, not what.
    not_identity: ClassVar[frozenset[str]] = frozenset(
        {"output", "snapshot_output", "memory_halvings", "injected", "runs_on"}
    )

    stage: str
    output: str = Field(description="URI of the artifact to commit")
    memory_halvings: int = Field(0, ge=0, description="Times the work in memory at once was halved after running out")
    injected: JobFaults | None = Field(None, description="Faults of a drill")

    @property
    def inputs(self) -> dict[str, Ref]:
        """The artifacts this job reads, by name: of several under one name, the second is `{name}_1`."""
        found: dict[str, Ref] = {}
        for name in type(self).model_fields:
            match getattr(self, name):
                case Ref() as ref:
                    found[name] = ref
                case (Ref() as first, *others):
                    found[name] = first
                    found |= {f"{name}_{place}": ref for place, ref in enumerate(others, start=1)}
        return found

    @property
    def software(self) -> dict[str, str]:
        """Versions recorded in the manifest and covered by the digest."""
        return software_versions(*self.packages) | {"stage": str(STAGE_VERSIONS[self.stage])}

    @property
    def label(self) -> str:
        """Short name for people: "rollout v0003", "evaluate v0001/heldout"."""
        place = re.search(r"(v\d{4}.*|[^/]*)$", self.output)
        return f"{self.stage} {place.group() if place else self.output}"

    def as_json(self) -> dict[str, JsonValue]:
        """The job as plain JSON, for manifests and job files."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """SHA-256 of the job's identity and its software."""
        return sha256_json([self.identity(), self.software])

    def identity(self) -> dict[str, JsonValue]:
        """All that decides the result, software apart: inputs count by digest, not by where they lie."""
        inputs = {name: ref.digest for name, ref in self.inputs.items()}
        apart = self.not_identity | inputs.keys()
        return {name: value for name, value in self.as_json().items() if name not in apart} | inputs
