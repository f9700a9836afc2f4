"""Jobs: everything a stage needs to know, as one JSON object that can be rerun by hand."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, TypeAdapter

from forge_core.artifacts import Ref
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
    TrainerConfig,
)
from forge_core.data_config import ChatConfig, Order
from forge_core.fit_config import DpoConfig, FitConfig, RewardModelConfig, SftConfig
from forge_core.quantize_config import QuantizeConfig, SchemeConfig
from forge_core.software import software_versions
from forge_core.stage_job import Role, StageJob
from forge_core.update_config import KlConfig, UpdateConfig


class DatasetJob(StageJob):
    """Materialise a dataset as JSON lines, so that every later job names it by digest."""

    role = "scorer"
    kind = "dataset"
    packages = ("reasoning-gym",)
    stage: Literal["dataset"] = "dataset"
    dataset: DatasetConfig
    source_sha256: str


class OverlapJob(StageJob):
    """Find the problems of evaluations in a training set."""

    role = "scorer"
    kind = "overlap"
    stage: Literal["overlap"] = "overlap"
    dataset: Ref
    held_out: tuple[Ref, ...]
    names: tuple[str, ...] = Field(description="Of the evaluations, one for each held-out set")
    counts: tuple[int, ...] = Field(description="Problems of each that are evaluated, the first ones")
    num_words: int


class StartJob(StageJob):
    """Build or import the starting policy."""

    role = "scorer"
    kind = "policy"
    packages = ("torch", "transformers")
    stage: Literal["start"] = "start"
    policy: PolicyConfig
    source: Ref | None = Field(None, description="The policy version of another run that this one starts from")
    seed: int


class FitJob(StageJob):
    """What every training on a fixed dataset has; its settings are the field that is named like the stage."""

    role = "trainer"
    packages = ("torch", "torchtitan", "transformers")
    policy: Ref
    dataset: Ref
    validation: Ref | None = Field(None, description="Dataset of the validation loss")
    chat: ChatConfig = Field(default_factory=ChatConfig)
    trainer: TrainerConfig
    seed: int
    snapshot_output: str | None = Field(None, description="Prefix of the URIs of snapshots on the way")

    @property
    def fit(self) -> FitConfig:
        """The settings."""
        return getattr(self, self.stage)

    def identity(self) -> dict[str, JsonValue]:
        """How often a snapshot is made decides nothing."""
        identity = super().identity()
        settings = identity[self.stage]
        assert isinstance(settings, dict)
        del settings["checkpoint_every"]
        return identity


class SftJob(FitJob):
    """Supervised fine-tuning of a policy."""

    kind = "policy"
    stage: Literal["sft"] = "sft"
    sft: SftConfig


class DpoJob(FitJob):
    """Direct preference optimisation of a policy, against itself as the reference."""

    kind = "policy"
    stage: Literal["dpo"] = "dpo"
    dpo: DpoConfig


class RewardModelJob(FitJob):
    """A policy turned into a reward model."""

    kind = "reward_model"
    packages = ("torch", "transformers")
    stage: Literal["reward_model"] = "reward_model"
    reward_model: RewardModelConfig


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
    order: Order = "shuffled"
    group_size: int
    sampling: SamplingConfig
    chat: ChatConfig = Field(default_factory=ChatConfig)
    generator: GeneratorConfig
    rounded_to: SchemeConfig | None = Field(None, description="What the generator rounds the policy to, if anything")
    seed: int

    @property
    def software(self) -> dict[str, str]:
        """As of every job; what rounds the policy too."""
        rounding = () if self.rounded_to is None else ("torchao", "compressed-tensors")
        return super().software | software_versions(*rounding)


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
    chat: ChatConfig = Field(default_factory=ChatConfig)
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
    chat: ChatConfig = Field(default_factory=ChatConfig)
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
    chat: ChatConfig = Field(default_factory=ChatConfig)
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
Job = (
    DatasetJob
    | OverlapJob
    | StartJob
    | SftJob
    | DpoJob
    | RewardModelJob
    | RolloutJob
    | ReferenceJob
    | ScoreJob
    | UpdateJob
    | EvaluateJob
    | QuantizationJob
)
parse_job = TypeAdapter(Job).validate_python
