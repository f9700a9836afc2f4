"""Our settings as a torchtitan configuration, and the dotted overrides that reach the rest of it."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from pathlib import Path
from typing import Any, Literal

import torchtitan.trainer
from pydantic import JsonValue, TypeAdapter, ValidationError
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, Configurable, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.trainer.attention import DocumentAttention
from forge_core.trainer.device import DEVICE_TYPE

# torchtitan settings that an override may change. Every other one is either derived from ours or read by a part of
# torchtitan that this trainer does not run, where it would be ignored.
_OPEN = (
    "training.dtype",
    "training.enable_cpu_offload",
    "training.gc_freq",
    "training.gc_debug",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.enable_fsdp_symm_mem",
    "compile.*",
    "debug.deterministic",
    "debug.deterministic_warn_only",
    "debug.detect_anomaly",
    "optimizer.implementation",
    "lr_scheduler.min_lr_factor",
    "comm.init_timeout_seconds",
    "activation_checkpoint.*",
)
_OURS = {
    "training.local_batch_size": "trainer.micro_batch_rows",
    "training.global_batch_size": "sft.batch_size or grpo.prompts_per_iteration",
    "training.seq_len": "trainer.row_tokens",
    "training.max_norm": "optimizer.max_grad_norm",
    "training.steps": "sft.num_steps or grpo.num_iterations",
    "training.mixed_precision_param": "trainer.dtype",
    "parallelism.data_parallel_shard_degree": "trainer.num_ranks",
    "optimizer.param_groups": "optimizer.learning_rate, weight_decay, beta1, beta2 and epsilon",
    "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
    "lr_scheduler.total_steps": "sft.num_steps or grpo.num_iterations",
    "lr_scheduler.decay_type": "optimizer.schedule",
    "lr_scheduler.decay_ratio": "optimizer.schedule",
    "debug.seed": "seed",
    "checkpoint.interval": "grpo.checkpoint_every",
    "activation_checkpoint": "trainer.activation_checkpoint",
}


@dataclasses.dataclass(kw_only=True, slots=True)
class NotUsed(Configurable.Config):
    """A part of torchtitan's trainer that has no work here: batches arrive ready-made and tokenized."""

    def build(self, **kwargs: object) -> None:
        return None


def compute_dtype(trainer: TrainerConfig) -> Literal["float32", "bfloat16"]:
    """Name of the dtype of the forward pass; weights, gradients and optimizer state stay float32."""
    if trainer.dtype != "auto":
        return trainer.dtype
    return "float32" if DEVICE_TYPE == "cpu" else "bfloat16"


def attention_config(trainer: TrainerConfig) -> Module.Config:
    """The attention kernel: per-document SDPA on a CPU, else varlen, or flex where varlen would round to bfloat16."""
    if DEVICE_TYPE == "cpu":
        return DocumentAttention.Config()
    is_bfloat16 = compute_dtype(trainer) == "bfloat16"
    if trainer.attention == "varlen" and not is_bfloat16:
        raise ValueError(
            f"trainer.attention is varlen and trainer.dtype is {trainer.dtype}; varlen kernels compute in bfloat16, "
            "use attention flex or dtype bfloat16"
        )
    use_varlen = trainer.attention == "varlen" or (trainer.attention == "auto" and is_bfloat16)
    return VarlenAttention.Config() if use_varlen else FlexAttention.Config()


def build_config(
    model_spec: ModelSpec,
    *,
    trainer: TrainerConfig,
    optimizer: OptimizerConfig,
    total_steps: int,
    seed: int,
    scratch: Path,
) -> torchtitan.trainer.Trainer.Config:
    """The configuration of torchtitan's trainer, overrides applied."""
    config = torchtitan.trainer.Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="",
        dump_folder=str(scratch),
        tokenizer=NotUsed(),  # pyrefly: ignore [bad-argument-type]
        dataloader=NotUsed(),  # pyrefly: ignore [bad-argument-type]
        optimizer=optimizer_config(optimizer, has_norms=trainer.lora is None),
        lr_scheduler=lr_scheduler_config(optimizer, total_steps),
        training=TrainingConfig(
            local_batch_size=trainer.micro_batch_rows,
            seq_len=trainer.row_tokens,
            steps=max(1, total_steps),
            mixed_precision_param=compute_dtype(trainer),
            disable_cuda_graphs=True,  # packed rows differ in their documents, so nothing could be replayed
        ),
        # The other backends need a type checker's runtime; this one trains on gloo and NCCL alike.
        parallelism=ParallelismConfig(data_parallel_shard_degree=trainer.num_ranks, spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=False, initial_load_model_only=False),
        activation_checkpoint=_activation_checkpoint(trainer),
        compile=CompileConfig(components=["model"]),
        debug=DebugConfig(seed=seed),
        loss=CrossEntropyLoss.Config(),
    )
    apply_overrides(config, trainer.overrides)
    return config


def optimizer_config(optimizer: OptimizerConfig, *, has_norms: bool) -> OptimizersContainer.Config:
    """AdamW over all that is trained; weight decay spares the scales of norms, which it would pull away from 1."""
    arguments = {
        "lr": optimizer.learning_rate,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
    }
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=arguments)]
    if has_norms and optimizer.weight_decay > 0:
        spared = arguments | {"weight_decay": 0.0}
        groups.insert(0, ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs=spared))
    return OptimizersContainer.Config(param_groups=groups)


def lr_scheduler_config(optimizer: OptimizerConfig, total_steps: int) -> LRSchedulersContainer.Config:
    """Warm-up, then constant or decaying to zero after `total_steps`."""
    if optimizer.schedule == "constant":
        # No decay phase; a constant rate does not end, so training may go on past total_steps.
        return LRSchedulersContainer.Config(
            warmup_steps=optimizer.warmup_steps, total_steps=2**31, decay_ratio=0.0, decay_type="linear"
        )
    if optimizer.warmup_steps > total_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, more than the {total_steps} steps of the run; lower "
            "it or use schedule constant"
        )
    return LRSchedulersContainer.Config(
        warmup_steps=optimizer.warmup_steps, total_steps=total_steps, decay_type=optimizer.schedule
    )


def apply_overrides(config: torchtitan.trainer.Trainer.Config, overrides: dict[str, JsonValue]) -> None:
    """Set dotted torchtitan settings; raises ValueError for a name, or a value, that would not take effect."""
    for name, value in overrides.items():
        owner, field = _find_setting(config, name)
        if name in _OURS:
            raise ValueError(f"trainer.overrides sets {name}, which follows from ours; set {_OURS[name]} instead")
        if not any(name == allowed or (allowed[-1] == "*" and name.startswith(allowed[:-1])) for allowed in _OPEN):
            raise ValueError(
                f"trainer.overrides sets {name}, which has no effect in this trainer; remove it (open settings: "
                f"{', '.join(_OPEN)})"
            )
        try:
            checked = TypeAdapter(typing.get_type_hints(type(owner))[field]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"trainer.overrides sets {name} to {value!r}: {error.errors()[0]['msg']}") from error
        setattr(owner, field, checked)
    for section in {name.split(".")[0] for name in overrides}:
        if hasattr(getattr(config, section), "__post_init__"):
            getattr(config, section).__post_init__()  # torchtitan's own checks between fields


def _find_setting(config: torchtitan.trainer.Trainer.Config, name: str) -> tuple[Any, str]:
    """The object and field that a dotted name means."""
    *path, field = name.split(".")
    owner: Any = config
    for part in path:
        owner = getattr(owner, part) if _has_field(owner, part) else None
    if not _has_field(owner, field):
        known = _setting_names(config)
        close = difflib.get_close_matches(name, known, n=3)
        # The last part alone finds a setting under the wrong section.
        close += [other for other in known if other.split(".")[-1] == field and other not in close]
        hint = f"did you mean {' or '.join(close)}?" if close else f"settings start with {', '.join(_sections(config))}"
        raise ValueError(f"trainer.overrides sets {name}, which torchtitan does not have; {hint}")
    return owner, field


def _has_field(owner: Any, name: str) -> bool:
    return dataclasses.is_dataclass(owner) and name in {field.name for field in dataclasses.fields(owner)}


def _setting_names(config: torchtitan.trainer.Trainer.Config) -> list[str]:
    return [
        f"{section}.{field.name}"
        for section in _sections(config)
        for field in dataclasses.fields(getattr(config, section))
    ]


def _sections(config: torchtitan.trainer.Trainer.Config) -> list[str]:
    names = (field.name for field in dataclasses.fields(config) if field.name != "model_spec")
    return [name for name in names if dataclasses.is_dataclass(getattr(config, name))]


def _activation_checkpoint(trainer: TrainerConfig) -> SelectiveAC.Config | FullAC.Config | None:
    match trainer.activation_checkpoint:
        case "none":
            return None
        case "selective":
            return SelectiveAC.Config()
        case "full":
            return FullAC.Config()
