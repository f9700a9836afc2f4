"""How a policy is trained, apart from what it is trained on: engine, adapters, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from forge_core.settings import Settings

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_PROJECTIONS: tuple[Projection, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


class OptimizerConfig(Settings):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Shape after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of all but norms")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.99, ge=0, lt=1, description="Decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are rescaled to at most this global norm")


class LoraConfig(Settings):
    """Low-rank adapters beside frozen weights: W x + alpha / rank * B A x, with B = 0 at the start."""

    rank: int = Field(16, ge=1, description="Rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, description="The adapters' output counts alpha / rank")
    target_modules: tuple[Projection, ...] = Field(
        ALL_PROJECTIONS, min_length=1, description="Projections that get adapters, in every layer"
    )

    @model_validator(mode="after")
    def _keys_and_values_go_together(self) -> LoraConfig:
        if len({"k_proj", "v_proj"} & set(self.target_modules)) == 1:
            raise ValueError(
                f"lora.target_modules is {self.target_modules}; torchtitan describes k_proj and v_proj as one, so name "
                "both or neither"
            )
        return self


class TrainerConfig(Settings):
    """How a policy is trained, apart from what it is trained on."""

    num_ranks: int = Field(1, ge=1, description="Trainer processes (one per GPU, or gloo ranks on CPU)")
    row_tokens: int = Field(1024, ge=8, description="Length of a packed row, tokens; no document may be longer")
    micro_batch_rows: int = Field(1, ge=1, description="Packed rows in one forward/backward pass of one rank")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute precision; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    attention: Literal["auto", "varlen", "flex"] = Field(
        "auto", description="Attention kernel on a GPU (auto: varlen); a CPU always uses per-document SDPA"
    )
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        "none", description="Recompute activations in the backward pass to save memory"
    )
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters instead of the weights")
    overrides: dict[str, JsonValue] = Field(
        default_factory=dict, description="Dotted torchtitan settings, e.g. {compile.enable: true}; unknown names fail"
    )

    def halved(self, times: int) -> TrainerConfig:
        """With the micro-batch halved so many times: first its rows, then, when one is left, the length of a row.

        The gradient is the same up to rounding, since it is summed over micro-batches.
        """
        rows, tokens = self.micro_batch_rows, self.row_tokens
        for _ in range(times):
            rows, tokens = (rows // 2, tokens) if rows > 1 else (rows, tokens // 2)
        return self.model_copy(update={"micro_batch_rows": rows, "row_tokens": max(8, tokens)})
