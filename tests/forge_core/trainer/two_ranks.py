"""What test_two_ranks.py runs under torchrun: trains on two gloo ranks and leaves results beside its scenario file.

The scenario is JSON: policy and out directories, trainer and optimizer settings, sequences, and a one-rank train state
to continue from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from forge_core.batching import TrainBatch, TrainSequence, pack_sequences
from forge_core.corrections import with_proximal
from forge_core.losses import LossInputs, LossOutput, grpo, gspo
from forge_core.trainer.checks import NonFiniteError
from forge_core.trainer.policy_trainer import PolicyTrainer
from forge_core.trainer_config import LoraConfig, OptimizerConfig, TrainerConfig
from forge_core.update_config import CorrectionConfig


def poisoned(inputs: LossInputs) -> LossOutput:
    """NaN on the first sequence alone, so that one rank sees it and the other does not."""
    return LossOutput(torch.where(inputs.sequence_ids == 0, float("nan"), inputs.logprobs))


def gspo_step(trainer: PolicyTrainer, sequences: list[TrainSequence], row_tokens: int) -> dict[str, float]:
    """A step that uses everything that is computed over the whole batch before it is dealt to ranks."""
    batch = pack_sequences(sequences, row_tokens, aggregation="sequence_mean")
    correction = CorrectionConfig(level="sequence", high=1.5)
    batch, mismatch = with_proximal(batch, trainer.logprobs(batch), correction)
    # The policy has moved since: two steps, so that the second one has a ratio.
    return [trainer.train_step(batch, gspo, entropy_coefficient=0.05) for _ in range(2)][1] | mismatch


def lora_steps(trainer: PolicyTrainer, batch: TrainBatch, out: Path, source: Path) -> list[dict[str, float]]:
    """Two steps of adapters, exported to `out`."""
    metrics = [trainer.train_step(batch, grpo) for _ in range(2)]
    trainer.export_hf(out, source)
    return metrics


def main(scenario: dict, out: Path) -> None:
    sequences = [
        TrainSequence(torch.tensor(ids), torch.tensor(mask), torch.tensor(logprobs), advantage)
        for ids, mask, logprobs, advantage in scenario["sequences"]
    ]
    trainer_config = TrainerConfig(**scenario["trainer"], num_ranks=2)
    batch = pack_sequences(sequences, trainer_config.row_tokens)
    results = {}

    def open_trainer() -> PolicyTrainer:
        return PolicyTrainer.open(
            Path(scenario["policy"]),
            trainer=trainer_config,
            optimizer=OptimizerConfig(**scenario["optimizer"]),
            total_steps=scenario["total_steps"],
            seed=0,
            scratch=out / "scratch",
        )

    trainer = open_trainer()
    logprobs = trainer.logprobs(batch)
    try:
        trainer.train_step(batch, poisoned)
    except NonFiniteError as error:
        results["error"] = str(error)
    results["metrics"] = [trainer.train_step(batch, grpo) for _ in range(2)]
    trainer.save_train_state(out / "two_rank_state")
    results["metrics"] += [trainer.train_step(batch, grpo) for _ in range(2)]
    trainer.export_hf(out / "export", Path(scenario["policy"]))
    results["gspo"] = gspo_step(trainer, sequences, trainer_config.row_tokens)
    trainer.close()

    trainer = open_trainer()
    trainer.load_train_state(Path(scenario["one_rank_state"]))
    results["resumed"] = [trainer.train_step(batch, grpo) for _ in range(2)]
    trainer.close()

    trainer_config = trainer_config.model_copy(update={"lora": LoraConfig(rank=3)})
    trainer = open_trainer()
    results["lora"] = lora_steps(trainer, batch, out / "lora", Path(scenario["policy"]))
    rank = dist.get_rank()
    trainer.close()
    save_file({"logprobs": logprobs}, out / f"logprobs-{rank}.safetensors")
    (out / f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
