"""The device torchtitan runs on, and the process group; imported before any other module of torchtitan.

torchtitan 0.3.0 reads the device type into module globals at import and falls back to "cuda" without an accelerator,
logs through the root logger, and insists on FlashAttention 3 or 4 on recent GPUs. The three are put right here.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import logging
import os
import warnings
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

# Both log warnings at import that no user can act on: missing CUDA extensions, and a deprecation inside torchao.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
# torchtitan seeds DTensor's generator on every start; nothing here draws random numbers in the model.
warnings.filterwarnings("ignore", message="DTensor (random operators|manual_seed)", category=UserWarning)

import torchtitan.tools.logging  # noqa: E402

torchtitan.tools.logging.logger = logging.getLogger("torchtitan")
torchtitan.tools.logging.logger.setLevel(logging.WARNING)

import torchtitan.tools.utils as torchtitan_device  # noqa: E402

if torchtitan_device.device_type == "cuda" and not torch.cuda.is_available():
    torchtitan_device.device_type = "cpu"
    torchtitan_device.device_module = SimpleNamespace(  # pyrefly: ignore [bad-assignment]
        **vars(torch.cpu)
        | {
            # Memory statistics that torchtitan reads when it starts and torch.cpu does not keep.
            "get_device_name": lambda device=None: "cpu",
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1),
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "memory_stats": lambda device=None: {},
        }
    )

_FLASH_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn"}
_newest_flash = torchtitan_device.get_cuda_flash_attention_impl()
if _newest_flash is not None and importlib.util.find_spec(_FLASH_MODULES[_newest_flash]) is None:
    # FlashAttention 2 ships with torch; the newer ones are packages that may not be installed.
    torchtitan_device.get_cuda_flash_attention_impl = lambda: None

_group_numbers = itertools.count()
DEVICE_TYPE: str = torchtitan_device.device_type


def start_process_group(num_ranks: int, *, timeout_seconds: float) -> None:
    """Join the process group that torchrun announces, or form one of a single rank.

    Raises ValueError when it has other than `num_ranks` ranks.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group already exists; close() the previous PolicyTrainer before the next open()")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != num_ranks:
        raise ValueError(
            f"trainer.num_ranks is {num_ranks}, but {started} processes run; start the trainer with "
            f"torchrun --nproc-per-node {num_ranks}"
        )
    os.environ.setdefault("LOCAL_RANK", "0")  # torchtitan picks the device by it
    backend = "gloo" if DEVICE_TYPE == "cpu" else None
    timeout = timedelta(seconds=timeout_seconds)
    store, rank = _rendezvous()
    # Every group gets its own part of the store: ranks that found the addresses of a closed group there would hang.
    group_store = dist.PrefixStore(f"trainer-{next(_group_numbers)}", store)
    dist.init_process_group(backend, timeout=timeout, store=group_store, rank=rank, world_size=num_ranks)


@functools.cache
def _rendezvous() -> tuple[dist.Store, int]:
    """The store in which ranks find each other, and the rank of this process; one per process, for all its groups."""
    if "RANK" not in os.environ:
        return dist.HashStore(), 0  # in memory: needs no address or port, so single-process trainers never collide
    store, rank, _ = next(iter(dist.rendezvous("env://")))
    return store, rank


def stop_process_group() -> None:
    """Leave the process group, so that the next trainer of this process can form its own."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.enable()  # torchtitan's trainer switches collection off


def peak_flops() -> float:
    """bfloat16 operations per second that the maker states for this GPU."""
    return torchtitan_device.get_peak_flops(torch.cuda.get_device_name())
