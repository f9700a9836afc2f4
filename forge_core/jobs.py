"""Jobs: everything a stage needs to know, as one JSON object that can be rerun by hand."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, TypeAdapter

from forge_core.artifacts import Kind, Ref, sha256_json
from forge_core.config import (
    DatasetConfig,
    EvalConfig,
    FunctionConfig,
    GeneratorConfig,
    OptimizerConfig,
    OverlongConfig,
    PolicyConfig,
    RewardConfig,
    SamplingConfig,
    SftConfig,
    TrainerConfig,
)
from forge_core.faults import JobFaults
from forge_core.quantize_config import QuantizeConfig
from forge_core.settings import Settings
from forge_core.software import software_versions
from forge_core.update_config import KlConfig, UpdateConfig

Role = Literal["trainer", "generator", "scorer", "reference"]

# Bump a stage's number when its code changes what it computes: outputs of older code then count as another job.
STAGE_VERSIONS = {
    "dataset": 1,
    "start": 1,
    "sft": 2,
    "rollout": 2,
    "reference": 1,
    "score": 2,
    "update": 2,
    "evaluate": 1,
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
        """SHA-256 of the job's identity: inputs count by digest, not by where they lie."""
        inputs = {name: ref.digest for name, ref in self.inputs.items()}
        apart = self.not_identity | inputs.keys()
        identity = {name: value for name, value in self.as_json().items() if name not in apart}
        identity |= inputs
        return sha256_json([identity, self.software])


class DatasetJob(StageJob):
    """Materialise a dataset as JSON lines, so that every later job names it by digest."""

    role = "scorer"
    kind = "dataset"
    packages = ("reasoning-gym",)
    stage: Literal["dataset"] = "dataset"
    dataset: DatasetConfig
    source_sha256: str


class StartJob(StageJob):
    """Build or import the starting policy."""

    role = "scorer"
    kind = "policy"
    packages = ("torch", "transformers")
    stage: Literal["start"] = "start"
    policy: PolicyConfig
    source: Ref | None = Field(None, description="The policy version of another run that this one starts from")
    seed: int


class SftJob(StageJob):
    """Supervised fine-tuning of a policy."""

    role = "trainer"
    kind = "policy"
    packages = ("torch", "torchtitan", "transformers")
    stage: Literal["sft"] = "sft"
    policy: Ref
    dataset: Ref
    sft: SftConfig
    trainer: TrainerConfig
    seed: int


class RolloutJob(StageJob):
    """Sample groups of completions from a policy."""

    role = "generator"
    kind = "rollouts"
    packages = ("torch", "vllm", "transformers")
    stage: Literal["rollout"] = "rollout"
    policy: Ref
    dataset: Ref
    first_prompt: int = Field(description="Place of the first prompt in the endless shuffled stream of the dataset")
    num_prompts: int
    group_size: int
    sampling: SamplingConfig
    generator: GeneratorConfig
    seed: int


class ReferenceJob(StageJob):
    """Log-probs of a rollout set's completions under the frozen reference policy."""

    kind = "reference_logprobs"
    packages = ("torch", "torchtitan", "transformers")
    stage: Literal["reference"] = "reference"
    policy: Ref
    rollouts: Ref
    temperature: float
    trainer: TrainerConfig
    seed: int
    runs_on: Literal["own", "cpu", "trainer"] = "own"

    @property
    def role(self) -> Role:  # pyrefly: ignore [bad-override]  the only stage whose process is a setting
        """The process that takes the job."""
        return "trainer" if self.runs_on == "trainer" else "reference"


class ScoreJob(StageJob):
    """Rewards and advantages of a rollout set."""

    role = "scorer"
    kind = "scored"
    packages = ("torch", "math-verify", "reasoning-gym")
    stage: Literal["score"] = "score"
    rollouts: Ref
    rewards: tuple[RewardConfig, ...]
    advantage: FunctionConfig
    reference_logprobs: Ref | None = None
    kl: KlConfig | None = Field(None, description="Penalty of the rewards, None when they have none")
    drop_uniform: bool = True
    spread_of: Literal["total", "rewards"] = Field(
        "total", description="What must differ within a group for it to teach: rewards with penalties or without"
    )
    overlong: OverlongConfig | None = None
    drop_truncated: bool = False
    max_tokens: int = Field(0, description="Longest completion there can be, 0 when nothing depends on it")
    source_sha256: dict[str, str]


class UpdateJob(StageJob, UpdateConfig):
    """One policy version forward: policy[k + 1] = update(policy[k], scored[k])."""

    role = "trainer"
    kind = "policy"
    packages = ("torch", "torchtitan", "transformers")
    stage: Literal["update"] = "update"
    policy: Ref
    scored: tuple[Ref, ...] = Field(description="The scored rollout sets of one iteration")
    num_groups: int = Field(0, description="Groups to train on, the first ones that teach; 0 for all")
    source_sha256: str = Field(description="Of the loss")
    optimizer: OptimizerConfig
    total_steps: int = Field(description="Optimizer steps of the whole run, 0 when the schedule does not depend on it")
    max_tokens: int = Field(0, description="Longest completion there can be, 0 when nothing depends on it")
    temperature: float
    trainer: TrainerConfig
    seed: int
    snapshot_output: str | None = Field(None, description="URI for a snapshot of the train state after this update")


class EvaluateJob(StageJob):
    """Accuracy of a policy on held-out problems."""

    role = "generator"
    kind = "eval"
    packages = ("torch", "vllm", "transformers", "math-verify", "reasoning-gym")
    stage: Literal["evaluate"] = "evaluate"
    policy: Ref
    dataset: Ref
    evaluation: EvalConfig
    generator: GeneratorConfig
    source_sha256: str
    seed: int


class QuantizeJob(StageJob):
    """A policy with its Linear layers quantized, calibrated on sequences of rollouts or of a dataset."""

    role = "scorer"
    kind = "quantized_policy"
    packages = ("torch", "torchao", "compressed-tensors", "transformers")
    stage: Literal["quantize"] = "quantize"
    policy: Ref
    rollouts: tuple[Ref, ...] = Field(description="Rollout sets to calibrate on, none when a dataset is")
    dataset: Ref | None = Field(None, description="Conversations to calibrate on instead")
    previous: Ref | None = Field(None, description="A quantized policy whose calibration this one is compared with")
    quantize: QuantizeConfig
    max_mae: float = Field(0.0, description="Error that `mixed` keeps layers for, 0 when it keeps none")
    seed: int


class QatJob(StageJob):
    """A policy fine-tuned while it computes with quantized numbers, on its own rollouts or on a dataset."""

    role = "trainer"
    kind = "policy"
    packages = ("torch", "torchao", "torchtitan", "transformers")
    stage: Literal["qat"] = "qat"
    policy: Ref
    rollouts: tuple[Ref, ...]
    dataset: Ref | None = None
    quantize: QuantizeConfig
    num_steps: int
    batch_size: int
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    seed: int


class SpeedJob(StageJob):
    """Tokens per second of a policy and of its quantized form, measured in turns on the same prompts."""

    role = "generator"
    kind = "eval"
    packages = ("torch", "vllm", "transformers")
    stage: Literal["speed"] = "speed"
    policy: Ref
    quantized: Ref
    dataset: Ref
    num_prompts: int
    max_tokens: int
    num_rounds: int
    generator: GeneratorConfig
    seed: int


QuantizationJob = QuantizeJob | QatJob | SpeedJob
Job = DatasetJob | StartJob | SftJob | RolloutJob | ReferenceJob | ScoreJob | UpdateJob | EvaluateJob | QuantizationJob
parse_job = TypeAdapter(Job).validate_python
