"""Tiny policies to quantize."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from forge_core.config import FreshPolicyConfig
from forge_core.policies import build_fresh_policy

SHAPE = FreshPolicyConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=128)


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    build_fresh_policy(directory, SHAPE, seed=0)
    model = load(directory)
    with torch.no_grad():  # sharper than at initialisation, so that errors show in the probabilities
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
        model.get_input_embeddings().weight.mul_(5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def model(policy_dir: Path) -> PreTrainedModel:
    return load(policy_dir)


@pytest.fixture(scope="session")
def sequences(policy_dir: Path) -> list[Tensor]:
    """What the policy samples itself, of various lengths."""
    model, generator = load(policy_dir), torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (40, 1), generator=generator)
    with torch.no_grad():
        for _ in range(19):
            probabilities = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], 1)
    lengths = torch.randint(5, 20, (40,), generator=generator).tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]


def load(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
