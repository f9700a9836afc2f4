"""A model's weights from and to Hugging Face safetensors, whole files at both ends whatever the number of ranks."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

# What a policy consists of besides its weights and config.json.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


def native_state(model: nn.Module, *, is_tied: bool) -> dict[str, Tensor]:
    """The model's own weights by torchtitan name, sharing their memory; tied embeddings appear once."""
    state = dict(model.state_dict())
    if is_tied:
        del state["lm_head.weight"]
    return state


def load_weights(model: nn.Module, adapter: BaseStateDictAdapter, hf_dir: Path, *, is_tied: bool) -> None:
    """Replace every weight of `model` by the one in `hf_dir`, in place.

    Raises ValueError, before anything is replaced, when a tensor is missing, unknown or of another shape.
    """
    stored = _read_safetensors(hf_dir)
    stored = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
    if is_tied:
        stored.pop("lm_head.weight", None)  # some writers store the shared matrix twice
    targets = {name: tensor for name, tensor in native_state(model, is_tied=is_tied).items() if not is_adapter(name)}
    shapes = adapter.to_hf({name: torch.empty(tensor.shape, device="meta") for name, tensor in targets.items()})
    _check_names_and_shapes(stored, shapes, hf_dir)

    native = adapter.from_hf(stored)
    with torch.no_grad():
        for name, target in targets.items():
            copy_into(target, native[name])


@contextmanager
def standing_in(model: nn.Module, stand_in: dict[str, Tensor]) -> Iterator[None]:
    """Run forward passes with other weights, from `read_shards`; afterwards the model has its own again, to the bit."""
    own = read_shards(model)
    _write_shards(model, stand_in)
    try:
        yield
    finally:
        _write_shards(model, own)


def read_shards(model: nn.Module) -> dict[str, Tensor]:
    """Copies, on the CPU, of what this rank holds of every weight."""
    return {name: local.to("cpu", copy=True) for name, local in _local_parameters(model)}


@torch.no_grad()
def _write_shards(model: nn.Module, shards: dict[str, Tensor]) -> None:
    """Replace, in place, what this rank holds of every weight."""
    for name, local in _local_parameters(model):
        local.copy_(shards[name])


def _local_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward pass without backward leaves gathered copies in place of the shards
    return [
        (name, parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach())
        for name, parameter in model.named_parameters()
    ]


def is_adapter(name: str) -> bool:
    """Whether a torchtitan name is that of a low-rank adapter's weight."""
    return ".lora_" in name


def gather_weights(model: nn.Module, *, is_tied: bool) -> dict[str, Tensor]:
    """Whole weights on the CPU, by torchtitan name; all ranks take part, and all but rank 0 get none."""
    is_writer = dist.get_rank() == 0
    whole: dict[str, Tensor] = {}
    for name, tensor in native_state(model, is_tied=is_tied).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_writer:
            # A copy: what was gathered from uneven shards is a view into a larger, padded buffer.
            whole[name] = full.detach().to("cpu", copy=True)
    return whole


def write_weights(whole: dict[str, Tensor], adapter: BaseStateDictAdapter, out_dir: Path) -> None:
    """Write whole weights to `out_dir` in Hugging Face layout, as safetensors of at most 5 GB each."""
    out_dir.mkdir(parents=True, exist_ok=True)
    hf_weights = {name: tensor.contiguous() for name, tensor in adapter.to_hf(whole).items()}
    save_torch_state_dict(hf_weights, out_dir, max_shard_size="5GB")


def copy_companions(source: Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Everything a policy needs besides weights, copied from `source`; config.json tells the exported dtype."""
    config = json.loads((source / "config.json").read_text())
    dtype_fields = [field for field in ("dtype", "torch_dtype") if field in config] or ["dtype"]
    config.update({field: str(dtype).removeprefix("torch.") for field in dtype_fields})
    (out_dir / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch.fnmatch(path.name, pattern) for pattern in _COMPANIONS):
            shutil.copyfile(path, out_dir / path.name)


def _read_safetensors(hf_dir: Path) -> dict[str, Tensor]:
    """All tensors by Hugging Face name; memory-mapped, so ranks of one machine share the pages."""
    index = hf_dir / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (hf_dir / name).exists():
            raise ValueError(f"{hf_dir} has no {name}; a policy directory must hold its weights as safetensors")
        tensors.update(load_file(hf_dir / name))
    return tensors


def _check_names_and_shapes(stored: dict[str, Tensor], expected: dict[str, Tensor], hf_dir: Path) -> None:
    missing, unknown = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"the weights in {hf_dir} do not fit its config.json: missing {missing[:3]} ({len(missing)} in all), "
            f"unknown {unknown[:3]} ({len(unknown)} in all); export the policy again"
        )
    for name, tensor in stored.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name} in {hf_dir} is {tuple(tensor.shape)}, but config.json makes it "
                f"{tuple(expected[name].shape)}; export the policy again"
            )


def copy_into(target: Tensor, source: Tensor) -> None:
    """Replace a weight, which may be a shard, by a whole tensor that every rank has."""
    source = source.to(device=target.device, dtype=target.dtype)
    if isinstance(target, DTensor):
        # Every rank has read the file, so each cuts its own shard and nothing is sent.
        source = distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)
