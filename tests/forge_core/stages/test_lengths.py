"""What is too long is left out and counted, or refused; it is never cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_core.artifacts import Ref
from forge_core.batching import TrainSequence
from forge_core.config import GeneratorConfig, SamplingConfig, TrainerConfig
from forge_core.plan import Plan
from forge_core.stages import learner
from forge_core.stages.rollout import fitting
from forge_core.stages.sft import fits
from tests.pipeline import tiny_config

POLICY = Ref(kind="policy", uri="file:///policies/v0000", digest="0" * 64)
DATASET = Ref(kind="dataset", uri="file:///datasets/x", digest="1" * 64)


def document(length: int) -> TrainSequence:
    return TrainSequence(torch.zeros(length).long(), torch.ones(length).bool(), torch.zeros(length))


def test_prompts_that_leave_no_room_for_a_completion_are_left_out(tmp_path: Path):
    config = tiny_config(str(tmp_path), generator=GeneratorConfig(max_model_len=16))
    job = Plan(config, "run").rollout(POLICY, DATASET, 0).model_copy(update={"sampling": SamplingConfig(max_tokens=6)})
    assert fitting([[0] * length for length in (10, 11, 3)], job) == [0, 2]
    with pytest.raises(ValueError, match=r"none of 2 prompts fits: the shortest has 11 .* leaves 10; raise generator"):
        fitting([[0] * 11, [0] * 12], job)


def test_conversations_longer_than_a_row_are_left_out(tmp_path: Path):
    job = Plan(tiny_config(str(tmp_path), trainer=TrainerConfig(row_tokens=8)), "run").sft(POLICY, DATASET)
    assert [fits(document(length), job) for length in (7, 8, 9)] == [True, True, False]
    with pytest.raises(ValueError, match=r"every document is longer than trainer\.row_tokens \(8\)"):
        learner.row_tokens(job, [])
