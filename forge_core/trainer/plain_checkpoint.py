"""Reading torch's distributed checkpoints, whose metadata and small values are pickles, as the data that they hold.

A pickle can call whatever it names. So before torch unpickles one, it must name nothing but the parts of a checkpoint.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from forge_core.artifacts import ArtifactError

_METADATA = "torch.distributed.checkpoint.metadata"
_PARTS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


def load_plain(state: dict[str, Any], in_dir: Path) -> None:
    """Load a checkpoint into `state`; raises ArtifactError when it would run code, or what torch has failed with."""
    for path in in_dir.glob("*.metadata"):
        with path.open("rb") as file:
            _PlainUnpickler(file).load()
    try:
        dcp.load(state, checkpoint_id=in_dir, planner=_PlainPlanner())
    except CheckpointException as error:  # a BaseException, of which a stage would die instead of reporting it
        cause, _ = next(iter(error.failures.values()))
        raise cause from error


class _PlainPlanner(DefaultLoadPlanner):
    """Puts what was read in its place; raises ArtifactError for what is no tensor, number, text or collection."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """A value that is not a tensor."""
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ArtifactError(f"the train state holds {read_item.dest_index.fqn} as code, not as data") from error
        value.seek(0)
        super().load_bytes(read_item, value)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _PARTS:
            raise ArtifactError(f"the metadata of the train state names {module}.{name}, which is no part of one")
        return super().find_class(module, name)
