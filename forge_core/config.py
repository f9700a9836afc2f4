"""The settings of a run: frozen, typed, and complete before the first process starts.

Imports nothing heavy, so that a flow, the Prefect UI and a stage process all share these classes. Every field is
documented with its unit; unknown fields are refused. YAML files live in `deployments/configs/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import Field, JsonValue, model_validator

from forge_core.alarms import DEFAULT_ALARMS, BoundsConfig
from forge_core.data_config import ChatConfig, DatasetConfig, Order, OverlapConfig
from forge_core.faults import FaultPlan
from forge_core.fit_config import DpoConfig, RewardModelConfig, SftConfig
from forge_core.gates import GatesConfig
from forge_core.operation import RetentionConfig, TimeLimitsConfig, WarmthConfig
from forge_core.quantize_config import QuantizeConfig, QuantizeGatesConfig, SchemeConfig
from forge_core.sampling_config import DynamicSamplingConfig, OverlongConfig, SamplingConfig
from forge_core.settings import FunctionConfig, Settings
from forge_core.trainer_config import OptimizerConfig, TrainerConfig
from forge_core.update_config import UpdateConfig


class RewardConfig(FunctionConfig):
    """One reward function and its weight in the total."""

    weight: float = Field(1.0, description="Weight of this reward in the total reward")
    gate: str | None = Field(
        None, description="Another reward of the list, by its fn: where that one is below 1, this one counts as 0"
    )
    timeout_seconds: float = Field(
        10.0, gt=0, description="Seconds one call may take; after that its completion cannot be scored"
    )


class FreshPolicyConfig(Settings):
    """Shape of a randomly initialised Qwen3 with a character tokenizer, used when `policy.uri` is `fresh://qwen3`."""

    hidden_size: int = Field(192, gt=0, description="Width of the residual stream")
    num_layers: int = Field(4, gt=0, description="Number of transformer blocks")
    num_heads: int = Field(6, gt=0, description="Number of attention heads")
    num_kv_heads: int = Field(2, gt=0, description="Number of key/value heads")
    head_dim: int = Field(32, gt=0, multiple_of=32, description="Width of one attention head (vLLM on a CPU wants 32s)")
    intermediate_size: int = Field(512, gt=0, description="Width of the feed-forward layer")
    max_position_embeddings: int = Field(512, gt=0, description="Longest sequence, tokens")


class PolicyConfig(Settings):
    """Where the starting policy comes from."""

    uri: str = Field(
        "fresh://qwen3",
        description="fresh://qwen3, hf://org/name, a directory in Hugging Face layout or a policy version of a run "
        "(local or any fsspec URI), or a .gguf file (local or any fsspec URI)",
    )
    fresh: FreshPolicyConfig = Field(default_factory=FreshPolicyConfig, description="Shape for fresh://qwen3")


class GeneratorConfig(Settings):
    """The vLLM engine."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute precision; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    max_num_seqs: int = Field(256, ge=1, description="Sequences decoded at once")
    max_model_len: int = Field(1024, ge=8, description="Longest prompt plus completion, tokens")
    overrides: dict[str, JsonValue] = Field(
        default_factory=dict, description="vLLM engine arguments passed through; unknown names fail"
    )

    def halved(self, times: int) -> GeneratorConfig:
        """With half as many sequences at once, so many times; what is sampled stays the same."""
        return self.model_copy(update={"max_num_seqs": max(1, self.max_num_seqs >> times)})


class GrpoConfig(UpdateConfig):
    """Reinforcement learning with group-relative advantages."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="Problems to practise on")
    order: Order = Field(
        "shuffled",
        description="Order of an epoch's problems; easy_first goes by metadata.difficulty, shuffled within each",
    )
    num_iterations: int = Field(10, ge=0, description="Rollout-score-update rounds; 0 skips this stage")
    prompts_per_iteration: int = Field(64, ge=1, description="Prompts (groups) per iteration")
    group_size: int = Field(8, ge=1, description="Completions per prompt, at least 2")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How rollouts are sampled")
    rewards: tuple[RewardConfig, ...] = Field(
        (RewardConfig(fn="exact_number"),), min_length=1, description="Reward functions, summed with their weights"
    )
    advantage: FunctionConfig = Field(FunctionConfig(fn="group_zscore"), description="Rewards -> advantages")
    overlong: OverlongConfig | None = Field(None, description="Penalty for completions close to the token limit")
    drop_truncated: bool = Field(
        False, description="Treat completions that ran into the token limit as if they had not been sampled"
    )
    drop_uniform: bool = Field(
        True,
        description="Leave groups without a spread of rewards out of the loss and of what it is divided by; false "
        "counts them, and lets a KL or entropy term act on them",
    )
    dynamic_sampling: DynamicSamplingConfig | None = Field(
        None, description="Sample until prompts_per_iteration groups have a spread of rewards"
    )
    reference_runs_on: Literal["own", "cpu", "trainer"] = Field(
        "own",
        description="Where the reference policy of `kl` runs: a process of its own (own: with the trainer's number of "
        "ranks; cpu: one rank without a GPU), or the trainer's, whose weights make room for it",
    )
    quantized_rollouts: SchemeConfig | None = Field(
        None,
        description="Numbers that the generator rounds the policy to, w8a8_dynamic, fp8 or w4a16: faster rollouts of a "
        "slightly other policy, which `correction` makes up for",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer of this stage")
    checkpoint_every: int = Field(10, ge=1, description="Policy versions between snapshots of the train state")
    alarms: dict[str, BoundsConfig] = Field(
        DEFAULT_ALARMS, description="Bounds of an iteration's metrics by name, e.g. {kl/reference: {high: 0.5}}"
    )

    @model_validator(mode="after")
    def _can_be_trained_on(self) -> GrpoConfig:
        if self.group_size < 2:
            raise ValueError(
                f"group_size is {self.group_size}; advantages compare the completions of a prompt with each other, "
                "so use at least 2 (8 is usual)"
            )
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                f"sampling.top_p is {self.sampling.top_p} and sampling.top_k is {self.sampling.top_k}; training "
                "rollouts need top_p=1 and top_k=0, else generator_logprobs are not those of the policy"
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0; training rollouts must be sampled, use 1.0")
        for reward in self.rewards:
            others = [other.fn for other in self.rewards if other is not reward]
            if reward.gate is not None and reward.gate not in others:
                raise ValueError(
                    f"rewards: {reward.fn} has the gate {reward.gate}, which must be another reward of the list "
                    f"({', '.join(others) or 'there is none'})"
                )
        if self.minibatches > self.prompts_per_iteration:
            raise ValueError(
                f"minibatches is {self.minibatches}, more than prompts_per_iteration ({self.prompts_per_iteration}); "
                "every minibatch needs at least one group"
            )
        if self.dynamic_sampling is not None and not self.drop_uniform:
            raise ValueError(
                "dynamic_sampling replaces groups without a spread of rewards, and drop_uniform: false keeps them; set "
                "one of the two"
            )
        if (scheme := self.quantized_rollouts) is not None:
            if self.correction is None:
                raise ValueError(
                    f"quantized_rollouts is {scheme.name} and correction is unset: the policy that samples is not the "
                    "one in training; set proximal: trainer and correction: {method: truncate, high: 2}"
                )
            if scheme.name == "w8a8_static":
                raise ValueError(
                    "quantized_rollouts is w8a8_static, which is calibrated on rollouts there are not yet; use "
                    "w8a8_dynamic, fp8 or w4a16"
                )
        if self.overlong is not None and self.overlong.buffer_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"overlong.buffer_tokens is {self.overlong.buffer_tokens}, more than sampling.max_tokens "
                f"({self.sampling.max_tokens}); the penalty must begin within the longest completion"
            )
        return self


class EvalConfig(Settings):
    """A named evaluation on held-out problems."""

    name: str = Field("heldout", pattern=r"^[a-z0-9_-]+$", description="Name in paths and metrics")
    dataset: DatasetConfig = Field(
        DatasetConfig(fn="arithmetic", kwargs={"split": "test"}), description="Held-out problems"
    )
    num_examples: int = Field(200, ge=1, description="Problems evaluated, the first ones of the dataset")
    max_tokens: int = Field(16, ge=1, description="Longest completion, tokens")
    pass_k: int = Field(4, ge=1, description="k of pass@k; also the number of completions sampled per problem")
    temperature: float = Field(1.0, gt=0, description="Temperature of the pass@k samples; accuracy itself is greedy")
    reward: FunctionConfig = Field(FunctionConfig(fn="exact_number"), description="A completion is right at reward 1")
    reward_timeout_seconds: float = Field(
        10.0, gt=0, description="Seconds one call of the reward may take; after that its completion counts as wrong"
    )


class RunConfig(Settings):
    """What every run has, whichever stages it goes through."""

    name: str = Field("policy", pattern=r"^[a-z0-9][a-z0-9_-]*$", description="Published as {root}/published/{name}")
    root: str = Field(".forge/store", description="Where artifacts live: a directory or any fsspec URI (s3://bucket/x)")
    seed: int = Field(0, ge=0, description="Seed of initialisation, data order and sampling")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The starting policy")
    chat: ChatConfig = Field(default_factory=ChatConfig, description="How messages become text")
    evals: tuple[EvalConfig, ...] = Field((EvalConfig(),), description="Held-out evaluations")
    overlap: OverlapConfig = Field(default_factory=OverlapConfig, description="Evaluations against training data")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The training engine")
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig, description="The sampling engine")
    gates: GatesConfig = Field(default_factory=GatesConfig, description="What a policy must show to be published")
    keep_warm: WarmthConfig = Field(default_factory=WarmthConfig, description="Processes that stay alive between jobs")
    time_limits: TimeLimitsConfig = Field(default_factory=TimeLimitsConfig, description="Time limits of the stages")
    reuse_from: str | None = Field(
        None,
        description="A run ({root}/{run_id}) or a root whose artifacts are taken over where the same job made them",
    )
    retention: RetentionConfig = Field(default_factory=RetentionConfig, description="Which files are deleted in time")
    fault_plan: FaultPlan | None = Field(None, description="Faults to inject on purpose; set by flows/drill.py")
    single_writer: bool = Field(
        False, description="Accept a store that ignores create-only writes, because nothing else writes to it"
    )


class SftRunConfig(RunConfig):
    """Start policy -> SFT -> evaluation -> publication."""

    sft: SftConfig = Field(default_factory=SftConfig, description="Supervised fine-tuning")


class DpoRunConfig(RunConfig):
    """Start policy -> DPO on preference pairs -> evaluation -> publication."""

    dpo: DpoConfig = Field(default_factory=DpoConfig, description="Preference pairs")


class RewardModelRunConfig(RunConfig):
    """Start policy -> reward model."""

    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig, description="Preference pairs")


class GrpoRunConfig(RunConfig):
    """Start policy -> GRPO iterations -> evaluation -> publication."""

    grpo: GrpoConfig = Field(default_factory=GrpoConfig, description="Reinforcement learning")


class PostTrainConfig(SftRunConfig, GrpoRunConfig):
    """A whole run: start policy -> SFT -> GRPO iterations -> publication, evaluated after each."""

    quantize: QuantizeConfig | None = Field(None, description="Quantize the last policy too; none when it is left out")
    quantize_gates: QuantizeGatesConfig = Field(
        default_factory=QuantizeGatesConfig, description="What a quantized policy must reach"
    )
    recalibrate_every: int = Field(1000, ge=0, description="Updates between calibrations within GRPO; 0 for none")


Config = TypeVar("Config", bound=Settings)


def load_config(path: str | Path, model: type[Config]) -> Config:
    """The config in a YAML file; raises ValueError naming the file and every wrong field."""
    try:
        return model.model_validate(yaml.safe_load(Path(path).read_text()) or {})
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"cannot load config {path}: {error}") from error


def read_yaml(path: str) -> dict[str, JsonValue]:
    """The content of a YAML file as `{"values": ...}`: the build step that `prefect.yaml` fills parameters with."""
    return {"values": yaml.safe_load(Path(path).read_text())}
