"""python -m benchmarks.gpu_check --out gpu_check.json

Trains a randomly initialised policy of the shape of Qwen3-0.6B on one GPU, supervised and with GRPO, in bfloat16, and
reports speed, memory, and how far its log-probabilities are from those of transformers in float32. Needs no network
and no tokenizer. Under four minutes on an H200. `--tiny` runs the same path on a CPU in seconds, as a smoke test.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge_core.batching import TrainBatch, TrainSequence, pack_sequences
from forge_core.config import OptimizerConfig, TrainerConfig
from forge_core.losses import LossInputs, LossOutput, cross_entropy, grpo
from forge_core.trainer.device import DEVICE_TYPE, peak_flops
from forge_core.trainer.policy_trainer import PolicyTrainer

QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
}
TINY = QWEN3_0_6B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}


@dataclass(frozen=True)
class Workload:
    """How much to train."""

    row_tokens: int
    num_rows: int
    document_tokens: tuple[int, int]  # shortest, longest
    num_steps: int  # timed, after two steps that are not


def main(arguments: list[str] | None = None) -> dict:
    """Run the check, print the report and write it; returns it too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, on any machine")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"), help="where the report goes (JSON)")
    parser.add_argument("--attention", choices=["auto", "varlen", "flex"], default="auto", help="kernel on the GPU")
    options = parser.parse_args(arguments)
    if not options.tiny and DEVICE_TYPE == "cpu":
        parser.error("no GPU was found; --tiny runs the same path on a CPU")

    workload = Workload(128, 4, (8, 64), 2) if options.tiny else Workload(8192, 16, (128, 2048), 5)
    with tempfile.TemporaryDirectory() as directory:
        report = check(TINY if options.tiny else QWEN3_0_6B, workload, options.attention, Path(directory))
    text = json.dumps(report, indent=2)
    options.out.write_text(text + "\n")
    print(text)
    return report


def check(shape: dict, workload: Workload, attention: str, directory: Path) -> dict:
    """The report: device, model, accuracy, and one entry of speed per loss."""
    num_parameters = write_policy(shape, directory / "policy")
    batch = random_batch(shape, workload)
    trainer = PolicyTrainer.open(
        directory / "policy",
        trainer=TrainerConfig(row_tokens=workload.row_tokens, attention=attention),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        total_steps=100,
        seed=0,
        scratch=directory / "scratch",
    )
    try:
        logprobs = trainer.logprobs(batch)
        report = {
            "device": torch.cuda.get_device_name() if DEVICE_TYPE == "cuda" else DEVICE_TYPE,
            "dtype": trainer.config.training.mixed_precision_param,
            "attention": type(trainer.model_config.first_attention.inner_attention).__qualname__.split(".")[0],
            "parameters": num_parameters,
            "accuracy": accuracy(logprobs, batch, directory / "policy"),
        }
        flops = step_flops(shape, num_parameters, batch)
        # On policy, as after a rollout; the generator's log-probabilities are the trainer's own.
        on_policy = replace(batch, generator_logprobs=logprobs)
        report["sft"] = speed(trainer, on_policy, cross_entropy, num_steps=workload.num_steps, flops=flops)
        report["grpo"] = speed(trainer, on_policy, grpo, num_steps=workload.num_steps, flops=flops)
    finally:
        trainer.close()
    return report


def write_policy(shape: dict, hf_dir: Path) -> int:
    """Number of parameters of the policy, after writing it with random weights."""
    torch.manual_seed(0)
    with torch.device(DEVICE_TYPE):
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(hf_dir)
    return sum(parameter.numel() for parameter in model.parameters())


def random_batch(shape: dict, workload: Workload) -> TrainBatch:
    """`num_rows` rows of random documents, the second half of each trained."""
    generator = torch.Generator().manual_seed(0)
    shortest, longest = workload.document_tokens
    documents: list[TrainSequence] = []
    num_tokens = 0
    while num_tokens < workload.num_rows * workload.row_tokens:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(0, shape["vocab_size"], (length,), generator=generator)
        advantage = float(torch.randn((), generator=generator))
        documents.append(TrainSequence(ids, torch.arange(length) >= length // 2, torch.zeros(length), advantage))
        num_tokens += length
    return pack_sequences(documents[:-1], workload.row_tokens)


def accuracy(logprobs: Tensor, batch: TrainBatch, hf_dir: Path) -> dict[str, float]:
    """Distance of the trainer's log-probabilities from transformers' in float32, over the first documents.

    `transformers_*` is what transformers itself loses in the trainer's dtype: the yardstick for the other numbers.
    """
    documents = [batch.sequence_ids == index for index in range(4)]
    trained = [document & batch.mask for document in documents]
    trainer_dtype = torch.float32 if DEVICE_TYPE == "cpu" else torch.bfloat16
    exact = transformers_logprobs(hf_dir, torch.float32, batch, documents)
    rounded = transformers_logprobs(hf_dir, trainer_dtype, batch, documents)
    ours = torch.cat([logprobs[mask] for mask in trained])
    return {
        "logprob_difference/mean": float((ours - exact).abs().mean()),
        "logprob_difference/max": float((ours - exact).abs().max()),
        "transformers_difference/mean": float((rounded - exact).abs().mean()),
        "transformers_difference/max": float((rounded - exact).abs().max()),
    }


@torch.no_grad()
def transformers_logprobs(hf_dir: Path, dtype: torch.dtype, batch: TrainBatch, documents: list[Tensor]) -> Tensor:
    """Log-probabilities [n] of the trained tokens of the documents at these places, one document after the other."""
    model = Qwen3ForCausalLM.from_pretrained(hf_dir, dtype=dtype).to(DEVICE_TYPE).eval()
    pieces = []
    for document in documents:
        logits = model(batch.tokens[document][None].to(DEVICE_TYPE)).logits[0].float()  # [T, V]
        labels = batch.labels[document][:, None].to(DEVICE_TYPE)
        logprobs = F.log_softmax(logits, dim=-1).gather(-1, labels)[:, 0].cpu()
        pieces.append(logprobs[batch.mask[document]])
    return torch.cat(pieces)


def step_flops(shape: dict, num_parameters: int, batch: TrainBatch) -> float:
    """Floating-point operations a step needs: 6 per weight and token, the output layer on trained tokens only."""
    output_layer = shape["vocab_size"] * shape["hidden_size"]  # tied: counted once among the parameters
    is_document = batch.sequence_ids >= 0
    lengths = batch.sequence_ids[is_document].bincount().double()
    # Causal: half of QK and half of PV, 2 operations each, forward once and backward twice.
    attention = 6 * shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * lengths.square()
    body = 6 * (num_parameters - output_layer) * int(is_document.sum())
    return float(body + 6 * output_layer * int(batch.mask.sum()) + attention.sum())


def speed(
    trainer: PolicyTrainer,
    batch: TrainBatch,
    loss: Callable[[LossInputs], LossOutput],
    *,
    num_steps: int,
    flops: float,
) -> dict[str, float | None]:
    """Tokens per second (documents, not padding), share of the device's peak, and memory, over `num_steps` steps."""
    for _ in range(2):
        metrics = trainer.train_step(batch, loss)
    if DEVICE_TYPE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(num_steps):
        metrics = trainer.train_step(batch, loss)  # ends with numbers on the host, so nothing is left running
    seconds = (time.perf_counter() - started) / num_steps
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": metrics["tokens/total"] / seconds,
        "model_flops_utilisation": flops / seconds / peak_flops() if DEVICE_TYPE == "cuda" else None,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE_TYPE == "cuda" else None,
        "loss": metrics["loss/policy"],
        "logprob_gap/max": metrics["logprob_gap/max"],
        "grad_norm": metrics["grad_norm/total"],
    }


if __name__ == "__main__":
    main()
