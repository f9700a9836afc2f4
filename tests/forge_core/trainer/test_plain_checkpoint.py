"""A checkpoint is data: what it holds comes back, and what it would run does not run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from forge_core.artifacts import ArtifactError
from forge_core.trainer.plain_checkpoint import load_plain


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


class Part:
    """State that is no tensor, as a learning-rate schedule has."""

    def __init__(self, state: dict) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def test_tensors_of_every_kind_numbers_and_texts_come_back(tmp_path: Path):
    values = {"step": 3, "rates": [0.1, 0.2], "name": "cosine", "flag": True, "nothing": None}
    tensors = {str(dtype): torch.ones(2, 3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    dcp.save({"model": tensors, "schedule": Part(values)}, checkpoint_id=tmp_path)
    zeros, schedule = {name: torch.zeros_like(one) for name, one in tensors.items()}, Part(values | {"step": 0})
    load_plain({"model": zeros, "schedule": schedule}, tmp_path)
    assert schedule.state == values
    assert all(torch.equal(zeros[name], one) for name, one in tensors.items())


def test_a_value_that_would_run_code_is_refused(tmp_path: Path):
    dcp.save({"schedule": Part({"step": Planted(tmp_path / "ran")})}, checkpoint_id=tmp_path / "state")
    with pytest.raises(ArtifactError, match=r"the train state holds schedule\.step as code, not as data"):
        load_plain({"schedule": Part({"step": 0})}, tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_metadata_that_would_run_code_are_refused(tmp_path: Path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "state")
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    with pytest.raises(ArtifactError, match=r"the metadata of the train state names .*, which is no part of one"):
        load_plain({"model": {"w": torch.zeros(2)}}, tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_a_part_may_not_lead_on_to_what_its_module_imports(tmp_path: Path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path)
    # Protocol 4 resolves dotted names, so an allowed module is not enough: os is an attribute of this one.
    (tmp_path / ".metadata").write_bytes(b"\x80\x04ctorch.distributed.checkpoint.filesystem\nos.getcwd\n)R.")
    with pytest.raises(ArtifactError, match=r"names torch\.distributed\.checkpoint\.filesystem\.os\.getcwd"):
        load_plain({"model": {"w": torch.zeros(2)}}, tmp_path)
