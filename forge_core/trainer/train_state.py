"""The train state in torch's distributed checkpoint format: what a later process needs to continue bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

from forge_core.trainer.plain_checkpoint import load_plain
from forge_core.trainer.weights import native_state


def save_train_state(
    out_dir: Path,
    *,
    model: nn.Module,
    is_tied: bool,
    optimizers: OptimizersContainer,
    lr_schedulers: LRSchedulersContainer,
    trainer: Stateful,
) -> None:
    """Write weights, optimizer, learning-rate schedule and step to `out_dir`; returns when all ranks have written."""
    state = _state(model, is_tied, optimizers, lr_schedulers, trainer)
    dcp.save(state, checkpoint_id=out_dir)


def load_train_state(
    in_dir: Path,
    *,
    model: nn.Module,
    is_tied: bool,
    optimizers: OptimizersContainer,
    lr_schedulers: LRSchedulersContainer,
    trainer: Stateful,
) -> None:
    """Restore what `save_train_state` wrote, also when it was written by another number of ranks.

    The weights are read into the memory of the model; the other parts take their state from what was read.
    """
    with warnings.catch_warnings():
        # torchtitan's schedule asks torch's for a rate outside of a step, on purpose.
        warnings.filterwarnings("ignore", message="To get the last learning rate")
        load_plain(_state(model, is_tied, optimizers, lr_schedulers, trainer), in_dir)


def save_weights(out_dir: Path, *, model: nn.Module, is_tied: bool) -> None:
    """Write the weights alone to `out_dir`, one file per rank."""
    dcp.save({"model": native_state(model, is_tied=is_tied)}, checkpoint_id=out_dir)


def load_weights(in_dir: Path, *, model: nn.Module, is_tied: bool) -> None:
    """Take over the weights that `save_weights` or `save_train_state` wrote."""
    load_plain({"model": native_state(model, is_tied=is_tied)}, in_dir)


def _state(
    model: nn.Module,
    is_tied: bool,
    optimizers: OptimizersContainer,
    lr_schedulers: LRSchedulersContainer,
    trainer: Stateful,
) -> dict[str, dict[str, Tensor] | Stateful | Any]:
    return {
        "model": native_state(model, is_tied=is_tied),
        "optimizer": optimizers,
        "lr_scheduler": lr_schedulers,
        "trainer": trainer,
    }
