"""A run that quantizes a policy: its settings, and its jobs beyond those of every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from forge_core import publication, storage
from forge_core.artifacts import Ref, is_pruned, read_manifest
from forge_core.config import DatasetConfig, PostTrainConfig, RunConfig, SamplingConfig, SftConfig
from forge_core.jobs import QatJob, QuantizeJob, RolloutJob, SpeedJob
from forge_core.manifests import run_of
from forge_core.plan import Plan
from forge_core.quantize_config import QuantizeConfig, QuantizeGatesConfig
from forge_core.settings import Settings


class CalibrationDataConfig(Settings):
    """Where the sequences to calibrate on come from."""

    source: Literal["auto", "stored", "fresh", "dataset"] = Field(
        "auto",
        description="stored rollouts of this very policy, fresh ones of its prompts, or conversations of a dataset as "
        "they stand; auto takes stored ones where there are enough, and fresh ones elsewhere",
    )
    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="Prompts of fresh rollouts, or dataset")
    group_size: int = Field(4, ge=1, description="Completions per prompt of fresh rollouts")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="How fresh rollouts are sampled")


class QatConfig(Settings):
    """Quantization-aware training, tried once when accuracy or probabilities miss their gates."""

    sft: SftConfig = Field(
        default_factory=SftConfig, description="What the policy was trained with: QAT takes a share of it"
    )
    data: Literal["dataset", "rollouts"] = Field(
        "dataset",
        description="Learn from the dataset of `sft`, or from the calibration's sequences, right or wrong",
    )
    steps_fraction: float = Field(0.1, gt=0, description="Share of the original number of steps")
    learning_rate_factor: float = Field(0.1, gt=0, description="Of the original learning rate")


class SpeedConfig(Settings):
    """The comparison of speed: both engines at once in one process, in turns."""

    num_rounds: int = Field(6, ge=0, description="Rounds after one that does not count; 0 leaves the comparison out")
    num_prompts: int = Field(64, ge=1, description="Prompts of a round")
    max_tokens: int = Field(32, ge=1, description="Tokens generated for each prompt, no fewer")
    min_busy: float = Field(
        0.8, ge=0, le=1, description="Share of the accelerator in use below which a hint says which setting to turn"
    )


class QuantizeRunConfig(RunConfig):
    """Policy -> calibration -> quantization -> measurement -> gates -> publication as {name}-quantized."""

    quantize: QuantizeConfig = Field(default_factory=QuantizeConfig, description="Scheme and calibration")
    data: CalibrationDataConfig = Field(default_factory=CalibrationDataConfig, description="Sequences to calibrate on")
    quantize_gates: QuantizeGatesConfig = Field(
        default_factory=QuantizeGatesConfig, description="What must hold before it is published"
    )
    qat: QatConfig | None = Field(None, description="Training to fall back on; none when it is left out")
    speed: SpeedConfig = Field(default_factory=SpeedConfig, description="Comparison of speed")

    @model_validator(mode="after")
    def _accuracy_can_be_compared(self) -> QuantizeRunConfig:
        if not self.evals:
            raise ValueError("evals is empty, and the accuracy gate needs problems; name at least one evaluation")
        return self


def last_step_config(config: PostTrainConfig) -> QuantizeRunConfig | None:
    """Settings of a training run's last step, None when it does not quantize; prompts are those it practised on."""
    if config.quantize is None:
        return None
    shared = {name: getattr(config, name) for name in RunConfig.model_fields}
    data = CalibrationDataConfig(
        dataset=config.grpo.dataset, group_size=config.grpo.group_size, sampling=config.grpo.sampling
    )
    return QuantizeRunConfig(**shared, quantize=config.quantize, quantize_gates=config.quantize_gates, data=data)


def idleness(config: QuantizeRunConfig, busy: float) -> str | None:
    """Which setting to turn when less of the accelerator is in use than wanted, None when it is enough."""
    if busy >= config.speed.min_busy:
        return None
    return (
        f"{busy:.0%} of the accelerator was in use with {config.speed.num_prompts} prompts and generator.max_num_seqs "
        f"{config.generator.max_num_seqs}, {config.speed.min_busy:.0%} are wanted: raise both; on a CPU give it more "
        "threads (OMP_NUM_THREADS), on several GPUs lower tensor_parallel_size (generator.overrides)"
    )


def quantized_name(config: RunConfig) -> str:
    """The published name of the quantized form."""
    return f"{config.name}{publication.QUANTIZED_SUFFIX}"


def stored_rollouts(policy: Ref) -> list[Ref]:
    """Rollout sets of the policy's run that were sampled from it, all refills of its iteration included.

    `policy` may be the copy that a run starts from: then they are those of the policy it was copied from.
    """
    manifest = read_manifest(policy.uri)
    source = manifest.inputs.get("source", policy) if manifest is not None else policy
    folder = f"{run_of(source.uri)}/rollouts"
    found = []
    for name in storage.list_names(folder):
        rollouts = read_manifest(f"{folder}/{name}")
        if rollouts is not None and rollouts.inputs["policy"].digest == source.digest and not is_pruned(rollouts.uri):
            found.append(rollouts.ref)
    return found


def num_sequences(rollouts: Sequence[Ref]) -> int:
    """Completions asked for in these rollout sets."""
    jobs = [manifest.job for ref in rollouts if (manifest := read_manifest(ref.uri)) is not None]
    return sum(int(job["num_prompts"]) * int(job["group_size"]) for job in jobs)  # pyrefly: ignore


def needed_sequences(config: QuantizeRunConfig) -> int:
    """Sequences to calibrate on and to hold out."""
    return config.quantize.calibration.num_samples + config.quantize.calibration.num_heldout


def published_quantized(config: RunConfig) -> Ref | None:
    """The quantized policy that is published under the run's name, None when there is none yet."""
    champion = publication.champion(config.root, quantized_name(config))
    return champion.policy if champion is not None else None


class QuantizePlan:
    """The jobs of one quantization."""

    def __init__(self, plan: Plan, config: QuantizeRunConfig) -> None:
        self._plan, self._config = plan, config

    @property
    def config(self) -> QuantizeRunConfig:
        """What was asked for; of a run that quantizes as its last step, a part of the run's own settings."""
        return self._config

    def rollout(self, policy: Ref, dataset: Ref) -> RolloutJob:
        """Fresh rollouts to calibrate on: a tenth more than needed, as a prompt that is too long is left out."""
        data = self._config.data
        return RolloutJob(
            output=f"{self._plan.run_uri}/rollouts/{_version(policy)}",
            policy=policy,
            dataset=dataset,
            first_prompt=0,
            num_prompts=math.ceil(1.1 * needed_sequences(self._config) / data.group_size),
            group_size=data.group_size,
            sampling=data.sampling,
            generator=self._config.generator,
            seed=self._config.seed,
        )

    def quantize(
        self, policy: Ref, *, rollouts: Sequence[Ref] = (), dataset: Ref | None = None, previous: Ref | None = None
    ) -> QuantizeJob:
        """The policy quantized, and its calibration compared with the previous one, by default the published policy's.

        A policy of this run that has been quantized, in its last recalibration perhaps, is that very artifact.
        """
        settings = self._config.quantize
        output = f"{self._plan.run_uri}/quantized/{_version(policy)}-{settings.scheme.name}"
        made = read_manifest(output)
        # A run that goes on after its publication compares with what it was begun with, not with itself.
        if made is not None:
            previous = made.inputs.get("previous")
            rollouts = [ref for name, ref in made.inputs.items() if name.startswith("rollouts")] or rollouts
        elif previous is None:
            previous = published_quantized(self._config)
        return QuantizeJob(
            output=output,
            policy=policy,
            rollouts=tuple(rollouts),
            dataset=dataset,
            previous=previous,
            chat=self._config.chat,
            quantize=settings,
            max_mae=self._config.quantize_gates.max_mae if settings.mixed == "auto" else 0.0,
            seed=self._config.seed,
        )

    def qat(self, policy: Ref, *, rollouts: Sequence[Ref], dataset: Ref | None) -> QatJob:
        """The policy after quantization-aware training, the next version."""
        qat = self._config.qat
        assert qat is not None
        sft, version = qat.sft, int(_version(policy).removeprefix("v")) + 1
        learning_rate = sft.optimizer.learning_rate * qat.learning_rate_factor
        return QatJob(
            output=f"{self._plan.run_uri}/policies/v{version:04d}",
            policy=policy,
            rollouts=tuple(rollouts),
            dataset=dataset,
            quantize=self._config.quantize,
            num_steps=math.ceil(sft.num_steps * qat.steps_fraction),
            batch_size=sft.batch_size,
            chat=self._config.chat,
            optimizer=sft.optimizer.model_copy(update={"learning_rate": learning_rate, "warmup_steps": 0}),
            # Whole weights: adapters would be rounded apart from what they are merged into.
            trainer=self._config.trainer.model_copy(update={"lora": None}),
            seed=self._config.seed,
        )

    def speed(self, policy: Ref, quantized: Ref, dataset: Ref) -> SpeedJob:
        """The speed of both."""
        speed = self._config.speed
        return SpeedJob(
            output=f"{self._plan.run_uri}/evals/{_version(quantized)}/speed",
            policy=policy,
            quantized=quantized,
            dataset=dataset,
            num_prompts=speed.num_prompts,
            max_tokens=speed.max_tokens,
            num_rounds=speed.num_rounds,
            generator=self._config.generator,
            seed=self._config.seed,
        )


def _version(ref: Ref) -> str:
    return ref.uri.rpartition("/")[2]
