"""A torchtitan model of any size from the `config.json` of a Hugging Face policy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, RMSNorm, RoPE, TransformerBlock
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from forge_core.trainer.logprob_head import LogprobHead

# Weights always come from safetensors, every one of them, so drawing random ones first would be wasted time.
_NOT_INITIALISED = {"weight": skip_param_init}

# What each setting must be for our model to compute what transformers computes; absent means transformers' default.
_REQUIRED_VALUES: dict[str, tuple[JsonValue, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, 1.0),
}


@dataclass(frozen=True)
class PolicyShape:
    """The numbers of a `config.json` that shape the model; equal shapes can hold each other's weights."""

    model_type: str
    dim: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    max_positions: int
    norm_eps: float
    is_tied: bool
    rope: dict[str, Any]

    @classmethod
    def read(cls, hf_dir: Path) -> PolicyShape:
        """The shape of the policy in `hf_dir`; raises ValueError for what torchtitan cannot reproduce."""
        config = json.loads((hf_dir / "config.json").read_text())
        _refuse_unsupported(config)
        is_qwen3 = config["model_type"] == "qwen3"
        dim, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
        return cls(
            model_type=config["model_type"],
            dim=dim,
            vocab_size=_positive(config, "vocab_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            # The defaults below are those of transformers for the architecture.
            num_kv_heads=config.get("num_key_value_heads") or (32 if is_qwen3 else num_heads),
            head_dim=config.get("head_dim") or (128 if is_qwen3 else dim // num_heads),
            hidden_dim=_positive(config, "intermediate_size"),
            max_positions=_positive(config, "max_position_embeddings"),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            is_tied=config.get("tie_word_embeddings", False),
            rope=_rope_parameters(config),
        )


def build_model_spec(shape: PolicyShape, *, inner_attention: Module.Config, row_tokens: int) -> ModelSpec:
    """torchtitan's description of the model: its config, how it is sharded, how its weights map to Hugging Face."""
    is_qwen3 = shape.model_type == "qwen3"
    rope = _rope(shape, row_tokens)
    model_config = (Qwen3Model if is_qwen3 else Llama3Model).Config(
        dim=shape.dim,
        vocab_size=shape.vocab_size,
        enable_weight_tying=shape.is_tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim, param_init=_NOT_INITIALISED
        ),
        norm=_norm(shape.dim, shape),
        lm_head=LogprobHead.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=_NOT_INITIALISED),
        layers=[_layer(shape, rope=rope, inner_attention=inner_attention) for _ in range(shape.num_layers)],
    )
    return ModelSpec(
        name=shape.model_type,
        flavor="from config.json",
        model=model_config,
        parallelize_fn=parallelize_qwen3 if is_qwen3 else parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=Qwen3StateDictAdapter if is_qwen3 else Llama3StateDictAdapter,
    )


def _layer(shape: PolicyShape, *, rope: RoPE.Config, inner_attention: Module.Config) -> TransformerBlock.Config:
    is_qwen3 = shape.model_type == "qwen3"
    return (Qwen3TransformerBlock if is_qwen3 else Llama3TransformerBlock).Config(
        attention_norm=_norm(shape.dim, shape),
        ffn_norm=_norm(shape.dim, shape),
        attention=make_gqa_config(
            dim=shape.dim,
            n_heads=shape.num_heads,
            n_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=_NOT_INITIALISED,
            wo_param_init=_NOT_INITIALISED,
            inner_attention=inner_attention,
            fuse_qkv=False,  # fused weights need load hooks that mix tensors and DTensors
            rope=rope,
            qk_norm=_norm(shape.head_dim, shape) if is_qwen3 else None,
        ),
        feed_forward=make_ffn_config(
            dim=shape.dim,
            hidden_dim=shape.hidden_dim,
            w1_param_init=_NOT_INITIALISED,
            w2w3_param_init=_NOT_INITIALISED,
        ),
    )


def _norm(dim: int, shape: PolicyShape) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=shape.norm_eps, param_init=_NOT_INITIALISED)


def _rope(shape: PolicyShape, row_tokens: int) -> RoPE.Config:
    # A row may be longer than the model's context: it holds several documents and each restarts at position 0.
    max_seq_len = max(shape.max_positions, row_tokens)
    theta = float(shape.rope["rope_theta"])
    if shape.model_type == "qwen3":
        return CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=max_seq_len, theta=theta)
    if shape.rope["rope_type"] == "default":
        return ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=max_seq_len, theta=theta)
    return ComplexRoPE.Config(
        dim=shape.head_dim,
        max_seq_len=max_seq_len,
        theta=theta,
        scaling="llama",
        scaling_factor=shape.rope["factor"],
        low_freq_factor=shape.rope["low_freq_factor"],
        high_freq_factor=shape.rope["high_freq_factor"],
        original_max_position_embeddings=shape.rope["original_max_position_embeddings"],
    )


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings with `rope_type` and `rope_theta`, from the layout of transformers 5 or the older one."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    supported = ("default",) if config["model_type"] == "qwen3" else ("default", "llama3")
    if rope["rope_type"] not in supported:
        raise ValueError(
            f"rope_type in config.json is {rope['rope_type']!r}; for {config['model_type']} the trainer reproduces "
            f"{' and '.join(supported)}, use a policy without this rope scaling"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor in config.json is {rope['partial_rotary_factor']}; the trainer rotates whole "
            "heads, use a policy with 1.0"
        )
    return rope


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("model_type") not in ("llama", "qwen3"):
        raise ValueError(
            f"model_type in config.json is {config.get('model_type')!r}; the trainer knows llama and qwen3, choose a "
            "policy of one of these architectures"
        )
    for field, allowed in _REQUIRED_VALUES.items():
        if field in config and config[field] not in allowed:
            raise ValueError(
                f"{field} in config.json is {config[field]!r}; the trainer reproduces {allowed[0]!r} only, choose a "
                "policy with that value"
            )
    # Qwen writes a window next to use_sliding_window = false, which means there is none.
    if config.get("sliding_window") is not None and "use_sliding_window" not in config:
        raise ValueError(
            f"sliding_window in config.json is {config['sliding_window']}; the trainer attends to whole documents, "
            "choose a policy without a sliding window"
        )
    if any(layer != "full_attention" for layer in config.get("layer_types") or ()):
        raise ValueError(
            f"layer_types in config.json is {sorted(set(config['layer_types']))}; the trainer reproduces "
            "full_attention only, choose a policy of such layers"
        )


def _positive(config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{field} in config.json is {value!r}; it must be a positive integer")
    return value
