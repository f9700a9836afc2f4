"""A sequence classifier with one label under training: plain PyTorch in one process.

torchtitan's models end in a vocabulary; a scalar head would be a model of our own there, with its own export. This one
is transformers' from the first step, so what is trained is what is later loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from forge_core.rewards.reward_model import batch_logits
from forge_core.trainer_config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class ScalarTrainer:
    """The model, AdamW in float32, and the schedule; on a GPU the passes are in bfloat16."""

    def __init__(self, hf_dir: Path, optimizer: OptimizerConfig, total_steps: int, *, seed: int) -> None:
        """Begin with the weights in `hf_dir`, those of a causal LM or of a classifier; a new head follows the seed."""
        torch.manual_seed(seed)
        self.model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            hf_dir, num_labels=1, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        if self.model.config.pad_token_id == self.model.config.eos_token_id:
            # Else transformers would take the end of the last turn, where the score is read, for padding.
            self.model.config.pad_token_id = None
        self.model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # no dropout: a step is reproducible
        self.settings, self.total_steps, self.step, self._factor = optimizer, total_steps, 0, 1.0
        spared = [weight for weight in self.model.parameters() if weight.ndim < 2]
        decayed = [weight for weight in self.model.parameters() if weight.ndim >= 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": spared, "weight_decay": 0.0}],
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
        )

    def scores(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B] of these conversations."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.model.device.type == "cuda"):
            return batch_logits(self.model, sequences)

    def train_step(self, losses: Sequence[Callable[[], Tensor]]) -> dict[str, float]:
        """One optimizer step on the sum of these losses, each computed and differentiated by itself."""
        self.optimizer.zero_grad()
        total = 0.0
        for loss in losses:
            value = loss()
            value.backward()
            total += value.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        if not math.isfinite(norm):
            raise ValueError(f"the gradient of step {self.step + 1} is {norm}; lower optimizer.learning_rate")
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._schedule() * self._factor
        self.optimizer.step()
        self.step, self._factor = self.step + 1, 1.0
        return {"loss/policy": total, "grad_norm/total": float(norm)}

    def scale_learning_rate(self, factor: float) -> None:
        """Take the next step at `factor` times the learning rate of the schedule."""
        self._factor = factor

    def _schedule(self) -> float:
        """What the peak learning rate counts in the next step: linear warm-up, then constant or falling to 0."""
        warmup = self.settings.warmup_steps
        if self.step < warmup:
            return (self.step + 1) / warmup
        left = (self.total_steps - self.step) / max(1, self.total_steps - warmup)
        match self.settings.schedule:
            case "constant":
                return 1.0
            case "linear":
                return left
            case "cosine":
                return 0.5 * (1 - math.cos(math.pi * left))

    def save_weights(self, out_dir: Path) -> None:
        """Write weights.safetensors."""
        out_dir.mkdir(parents=True, exist_ok=True)
        tensors = {name: weight.detach().cpu().contiguous() for name, weight in self.model.named_parameters()}
        save_file(tensors, out_dir / "weights.safetensors")

    def load_weights(self, in_dir: Path) -> None:
        """Read what `save_weights` wrote."""
        stored = load_file(in_dir / "weights.safetensors")
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(stored[name])

    def save_train_state(self, out_dir: Path) -> None:
        """Write the weights, the moments of AdamW and the step."""
        self.save_weights(out_dir)
        moments = {
            f"{moment}.{name}": self.optimizer.state[weight][moment].cpu()
            for name, weight in self.model.named_parameters()
            if weight in self.optimizer.state
            for moment in MOMENTS
        }
        save_file(moments | {"step": torch.tensor(self.step)}, out_dir / "optimizer.safetensors")

    def load_train_state(self, in_dir: Path) -> None:
        """Read what `save_train_state` wrote."""
        self.load_weights(in_dir)
        stored = load_file(in_dir / "optimizer.safetensors")
        self.step = int(stored["step"])
        for name, weight in self.model.named_parameters():
            # Copies: what safetensors returns is the file itself, which lies in the store.
            if f"{MOMENTS[0]}.{name}" in stored:
                moments = {moment: stored[f"{moment}.{name}"].to(weight.device, copy=True) for moment in MOMENTS}
                self.optimizer.state[weight] = {"step": torch.tensor(float(self.step)), **moments}
