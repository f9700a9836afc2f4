"""The jobs of a quantization."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forge_core.artifacts import Ref
from forge_core.config import GeneratorConfig, OptimizerConfig, TrainerConfig
from forge_core.data_config import ChatConfig
from forge_core.quantize_config import QuantizeConfig
from forge_core.stage_job import StageJob


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
