"""Shapes and settings of a policy on disk: what two policies must share to be exchanged in a running engine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.policies import read_tensor_headers

# In config.json, without effect on what the weights compute.
COSMETIC_CONFIG = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "architectures")


@dataclass(frozen=True)
class PolicyLayout:
    """What two policies must share for their weights to be exchanged in a running engine."""

    hf_dir: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    config: dict[str, Any]  # config.json without what is cosmetic

    @classmethod
    def read(cls, hf_dir: Path) -> PolicyLayout:
        """The layout of a policy; raises ValueError when a file is missing or broken."""
        if not (hf_dir / "config.json").is_file():
            raise ValueError(f"{hf_dir} has no config.json; give a directory in Hugging Face layout")
        config = json.loads((hf_dir / "config.json").read_text())
        tensors = read_tensor_headers(hf_dir)
        if config.get("tie_word_embeddings"):
            tensors.pop("lm_head.weight", None)  # a copy of the embeddings that some writers store as well
        return cls(hf_dir, tensors, {key: value for key, value in config.items() if key not in COSMETIC_CONFIG})

    @property
    def is_reloadable(self) -> bool:
        """Whether vLLM loads other weights over these ones; of int8 layers oneDNN has made a copy that it keeps."""
        groups = self.config.get("quantization_config", {}).get("config_groups", {}).values()
        return not any(group["weights"]["type"] == "int" and group.get("input_activations") for group in groups)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of a token's keys and values in float32, over all layers."""
        heads = self.config["num_attention_heads"]
        head_dim = self.config.get("head_dim") or self.config["hidden_size"] // heads
        num_kv_heads = self.config.get("num_key_value_heads") or heads
        return 2 * 4 * self.config["num_hidden_layers"] * num_kv_heads * head_dim

    def require_same(self, other: PolicyLayout) -> None:
        """Raises ValueError naming the first tensor or setting in which `other` differs."""
        for name in sorted(self.tensors.keys() | other.tensors.keys()):
            served, offered = self.tensors.get(name), other.tensors.get(name)
            if served is None or offered is None:
                problem = "has an unexpected tensor" if served is None else "lacks the tensor"
                raise ValueError(f"{other.hf_dir} {problem} {name}; {self.hf_dir} stays served")
            if served[1] != offered[1]:
                raise ValueError(
                    f"{other.hf_dir} has {name} with shape {offered[1]}, not {served[1]}; {self.hf_dir} stays served"
                )
        for key in sorted(self.config.keys() | other.config.keys()):
            if self.config.get(key) != other.config.get(key):
                raise ValueError(
                    f"{other.hf_dir} has {key}={other.config.get(key)} in config.json, not {self.config.get(key)}; "
                    "start a new generator for another architecture"
                )
