"""Tiny policies in Hugging Face layout, trainers on them, and batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from forge_core.batching import TrainBatch, TrainSequence
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.trainer.policy_trainer import PolicyTrainer

VOCAB_SIZE = 37
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The models are tiny, and threads that wait for each other on a busy machine cost far more than they bring."""
    torch.set_num_threads(1)


def write_policy(kind: str, directory: Path, *, edit: Callable[[torch.nn.Module], object] | None = None) -> Path:
    """A randomly initialised policy; `kind` is qwen3-tied, llama-tied or llama-untied."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,  # large enough that the logits differ from each other
        "tie_word_embeddings": kind.endswith("-tied"),
    }
    torch.manual_seed(0)
    if kind.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=16))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE))
    for norm in (parameter for name, parameter in model.named_parameters() if "norm" in name):
        torch.nn.init.uniform_(norm, 0.5, 1.5)  # all ones would hide a swapped or missing norm
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


@pytest.fixture(scope="session")
def policy_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy of each kind."""
    root = tmp_path_factory.mktemp("policies")
    return {kind: write_policy(kind, root / kind) for kind in ("qwen3-tied", "llama-tied", "llama-untied")}


@pytest.fixture
def qwen3(policy_dirs: dict[str, Path]) -> Path:
    return policy_dirs["qwen3-tied"]


@pytest.fixture
def make_policy(tmp_path: Path) -> Callable[..., Path]:
    """Writes an edited policy of a kind."""
    return lambda kind, edit: write_policy(kind, tmp_path / "edited", edit=edit)


@pytest.fixture
def open_trainer(tmp_path: Path) -> Iterator[Callable[..., PolicyTrainer]]:
    """Opens a trainer, after closing the one before; the last one is closed at the end of the test."""
    opened: list[PolicyTrainer] = []

    def open_(
        hf_dir: Path, *, optimizer: OptimizerConfig | None = None, total_steps: int = 8, **trainer
    ) -> PolicyTrainer:
        if opened:
            opened.pop().close()
        policy = PolicyTrainer.open(
            hf_dir,
            trainer=TrainerConfig(**{"row_tokens": 32, **trainer}),
            optimizer=optimizer or OptimizerConfig(learning_rate=1e-3),
            total_steps=total_steps,
            seed=0,
            scratch=tmp_path / "scratch",
        )
        opened.append(policy)
        return policy

    yield open_
    if opened:
        opened.pop().close()


@pytest.fixture(scope="session")
def make_sequences() -> Callable[[], list[TrainSequence]]:
    """Documents of 3 to 20 tokens, prompts of 2; lengths chosen so that rows hold unequal numbers of trained tokens."""

    def make() -> list[TrainSequence]:
        generator = torch.Generator().manual_seed(7)

        def sequence(length: int) -> TrainSequence:
            mask = torch.arange(length) >= 2
            logprobs = torch.where(mask, -3.6 + 0.4 * torch.rand(length, generator=generator), 0.0)
            ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
            return TrainSequence(ids, mask, logprobs, float(torch.randn((), generator=generator)))

        return [sequence(length) for length in (20, 3, 9, 17, 3, 11, 5, 14, 8, 20, 6)]

    return make


@pytest.fixture
def sequences(make_sequences: Callable[[], list[TrainSequence]]) -> list[TrainSequence]:
    return make_sequences()


@pytest.fixture
def transformers_logits() -> Callable[[Path, torch.Tensor], torch.Tensor]:
    """Logits [T, V] of one document by transformers."""

    def logits(hf_dir: Path, token_ids: torch.Tensor) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(token_ids[None]).logits[0]

    return logits


@pytest.fixture
def trainer_logits() -> Callable[[PolicyTrainer, TrainBatch], torch.Tensor]:
    """Logits [B, L, V] of packed rows by the trainer."""

    def logits(trainer: PolicyTrainer, batch: TrainBatch) -> torch.Tensor:
        with torch.no_grad():
            return trainer.forward(batch.to(trainer.device)).float().cpu()

    return logits


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., dict[str, torch.Tensor]]:
    """The weights a trainer exports, by Hugging Face name."""
    count = iter(range(100))

    def export(trainer: PolicyTrainer, source: Path) -> dict[str, torch.Tensor]:
        out = tmp_path / f"export-{next(count)}"
        trainer.export_hf(out, source)
        return load_file(out / "model.safetensors")

    return export


@pytest.fixture
def digest() -> Callable[[dict[str, torch.Tensor]], str]:
    """sha256 over all weights."""

    def sha256(weights: dict[str, torch.Tensor]) -> str:
        hashed = hashlib.sha256()
        for name in sorted(weights):
            hashed.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    return sha256
