"""A policy in training: torchtitan's Trainer, fed with packed batches and a policy loss.

torchtitan builds and shards the model, its optimizer and its learning-rate schedule. The loop is ours: a step is one
call, so that a stage can train, export and take the next rollouts without leaving the process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from forge_core.batching import TrainBatch
from forge_core.trainer import lora, train_state, weights
from forge_core.trainer.attention import find_documents
from forge_core.trainer.checks import NonFiniteError, check_batch, check_finite
from forge_core.trainer.device import DEVICE_TYPE, start_process_group, stop_process_group
from forge_core.trainer.logprob_head import LogprobHead, TokenQuery
from forge_core.trainer.models import PolicyShape, build_model_spec
from forge_core.trainer.objective import Loss, objective
from forge_core.trainer.token_sums import TokenSums
from forge_core.trainer.torchtitan_config import (
    attention_config,
    build_config,
    lr_scheduler_config,
    optimizer_config,
)
from forge_core.trainer_config import LoraConfig, OptimizerConfig, TrainerConfig
from forge_core.update_config import KlConfig


class PolicyTrainer(torchtitan.trainer.Trainer):
    """One policy with its optimizer, on one rank or on all ranks that torchrun started.

    Every method is called by all ranks together, with the same arguments.
    """

    shape: PolicyShape
    lora: LoraConfig | None
    seed: int
    optimizer_settings: OptimizerConfig
    total_steps: int

    @classmethod
    def open(
        cls,
        hf_dir: Path,
        *,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int,
        scratch: Path,
    ) -> PolicyTrainer:
        """The policy in `hf_dir`, ready to train from step 0.

        `total_steps` is the length of the learning-rate schedule, `scratch` a local directory for temporary files.
        """
        shape = PolicyShape.read(hf_dir)
        spec = build_model_spec(shape, inner_attention=attention_config(trainer), row_tokens=trainer.row_tokens)
        adapter = spec.state_dict_adapter
        assert adapter is not None
        if trainer.lora is not None:
            spec = replace(spec, model=lora.with_adapters(spec.model, trainer.lora))
        config = build_config(
            spec, trainer=trainer, optimizer=optimizer, total_steps=total_steps, seed=seed, scratch=scratch
        )
        start_process_group(trainer.num_ranks, timeout_seconds=config.comm.init_timeout_seconds)
        torchtitan_log = logging.getLogger("torchtitan")
        torchtitan_log.setLevel(logging.ERROR)  # it warns of an unknown peak speed on every CPU
        try:
            policy = cls(config)
            policy.lora, policy.seed = trainer.lora, seed
            policy._adopt(shape, adapter(spec.model, None), optimizer, total_steps)
            policy.load_policy(hf_dir)
        except BaseException:
            stop_process_group()
            raise
        finally:
            torchtitan_log.setLevel(logging.WARNING)
        return policy

    def init_distributed(self) -> ParallelDims:
        """The device meshes on the process group that `open` started, which needs no address on a single rank."""
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    def _adopt(
        self, shape: PolicyShape, adapter: BaseStateDictAdapter, optimizer: OptimizerConfig, total_steps: int
    ) -> None:
        self.shape = shape
        (model,) = self.model_parts
        assert isinstance(model, Decoder)
        assert isinstance(model.lm_head, LogprobHead)
        self.model, self.head = model, model.lm_head
        self.adapter = adapter
        self.fsdp_modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if DEVICE_TYPE == "cpu":
            for module in self.fsdp_modules:
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        self.optimizer_settings, self.total_steps = optimizer, total_steps

    def reset_optimizer(self, optimizer: OptimizerConfig, total_steps: int) -> None:
        """Start over at step 0 with a new optimizer and schedule, as `open` of the exported weights would."""
        # What overrides have set stays.
        self.config.optimizer = replace(
            optimizer_config(optimizer, has_norms=self.lora is None),
            implementation=self.config.optimizer.implementation,
        )
        schedule = lr_scheduler_config(optimizer, total_steps)
        self.config.lr_scheduler = replace(schedule, min_lr_factor=self.config.lr_scheduler.min_lr_factor)
        self.optimizers.zero_grad()
        for module in self.fsdp_modules:
            # A forward pass without backward leaves gathered copies in place of the sharded parameters.
            module.reshard()
        self.optimizers = self.config.optimizer.build(model_parts=self.model_parts)
        self.lr_schedulers = self.config.lr_scheduler.build(optimizers=self.optimizers, training_steps=total_steps)
        self.step = 0
        self.ntokens_seen = 0
        self.optimizer_settings, self.total_steps = optimizer, total_steps

    def scale_learning_rate(self, factor: float) -> None:
        """Take the next step at `factor` times the learning rate of the schedule."""
        for scheduler in self.lr_schedulers.schedulers:
            for group, learning_rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = learning_rate * factor

    def load_policy(self, hf_dir: Path) -> None:
        """Take over the weights in `hf_dir`, with fresh adapters where there are any; optimizer and step stay.

        Raises ValueError, and changes nothing, when they are not those of a policy of the same shape.
        """
        shape = PolicyShape.read(hf_dir)
        if shape != self.shape:
            raise ValueError(
                f"the policy in {hf_dir} is {shape}, but the open one is {self.shape}; open a trainer on it"
            )
        weights.load_weights(self.model, self.adapter, hf_dir, is_tied=self.shape.is_tied)
        if self.lora is not None:
            lora.reset_adapters(self.model, self.seed)

    def load_trained(self, hf_dir: Path) -> None:
        """Take over what was trained of the policy that this trainer has exported to `hf_dir`: weights or adapters."""
        if self.lora is None:
            self.load_policy(hf_dir)
        else:
            lora.load_adapter(self.model, self.adapter, hf_dir / lora.ADAPTER_DIRECTORY)

    def train_step(  # pyrefly: ignore [bad-override]  our loop, not torchtitan's, calls it
        self,
        batch: TrainBatch,
        loss: Loss,
        *,
        temperature: float = 1.0,
        kl: KlConfig | None = None,
        entropy_coefficient: float = 0.0,
    ) -> dict[str, float]:
        """One optimizer step on the whole batch; returns its metrics, equal on all ranks.

        The loss is the weighted sum over all trained tokens of all ranks (see `objective`). A batch without trained
        tokens has loss 0 and gradient 0. Raises NonFiniteError before the optimizer moves when the loss or the gradient
        norm is not finite.
        """
        check_batch(batch, temperature, self.config.training.seq_len, self.shape)
        if self.optimizer_settings.schedule != "constant" and self.step >= self.total_steps:
            raise ValueError(f"step {self.step} of a schedule of {self.total_steps}; open with a larger total_steps")
        own_rows = batch.for_rank(dist.get_rank(), dist.get_world_size())
        sums = TokenSums(max(1, int(batch.mask.sum())))
        objective_of = functools.partial(objective, loss, kl=kl, entropy_coefficient=entropy_coefficient, sums=sums)
        self.optimizers.zero_grad()
        for micro_batch in own_rows.micro_batches(self.config.training.local_batch_size):
            self.forward_backward_step(micro_batch, objective_of, temperature=temperature)
        max_norm = self.optimizer_settings.max_grad_norm
        grad_norm = float(clip_grad_norm_(self.model.parameters(), max_norm, foreach=True))  # before clipping
        metrics = sums.reduce()
        try:
            check_finite(metrics["loss/policy"] + metrics.get("loss/kl", 0.0), grad_norm, self.step)
        except NonFiniteError:
            self.optimizers.zero_grad()
            raise

        metrics["learning_rate"] = self.optimizers.optimizers[0].param_groups[0]["lr"]
        self.optimizers.step()
        self.lr_schedulers.step()
        self.step += 1
        self.gc_handler.run(self.step)
        return metrics | {
            "grad_norm/total": grad_norm,
            "grad_norm/clipped": min(grad_norm, max_norm),
            "tokens/trained": float(batch.mask.sum()),
            "tokens/total": float((batch.sequence_ids >= 0).sum()),
        }

    def forward_backward_step(  # pyrefly: ignore [bad-override]
        self,
        micro_batch: TrainBatch,
        objective_of: Callable[[TrainBatch, Tensor, Tensor], Tensor],
        *,
        temperature: float,
    ) -> None:
        """Add the gradient of the objective of a micro-batch of this rank, given its log-probs and entropies [n]."""
        micro_batch = micro_batch.to(self.device)
        with self.train_context():
            logprobs, entropies = self._query_tokens(micro_batch, temperature)  # [n], [n]
            objective_of(micro_batch, logprobs, entropies).backward()

    def forward(self, micro_batch: TrainBatch) -> Tensor | tuple[Tensor, Tensor]:
        """What the output layer returns for rows on the trainer's device: logits [B, L, V], unless it holds a query."""
        if DEVICE_TYPE == "cpu":
            attention_masks = find_documents(micro_batch.positions, micro_batch.sequence_ids)
        else:
            attention_masks = self.model.get_attention_masks(micro_batch.positions)
        return self.model(micro_batch.tokens, positions=micro_batch.positions, attention_masks=attention_masks)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch, *, temperature: float = 1.0) -> Tensor:
        """Log-probability [B, L] of every trained token under the current policy, 0 elsewhere, on the CPU."""
        check_batch(batch, temperature, self.config.training.seq_len, self.shape)
        num_ranks = dist.get_world_size()
        own_rows = batch.for_rank(dist.get_rank(), num_ranks)
        pieces = []
        for micro_batch in own_rows.micro_batches(self.config.training.local_batch_size):
            micro_batch = micro_batch.to(self.device)
            token_logprobs, _ = self._query_tokens(micro_batch, temperature)
            zeros = torch.zeros(micro_batch.mask.shape, device=self.device)
            pieces.append(zeros.masked_scatter(micro_batch.mask, token_logprobs))
        own = torch.cat(pieces)
        gathered = [torch.empty_like(own) for _ in range(num_ranks)]
        dist.all_gather(gathered, own)
        # Row i of rank r is row i * num_ranks + r of the batch.
        return torch.stack(gathered, dim=1).flatten(0, 1)[: batch.num_rows].cpu()

    def export_hf(self, out_dir: Path, source: Path) -> None:
        """Write the policy to `out_dir` in Hugging Face layout, tokenizer and chat template taken from `source`.

        Weights keep the dtype they are trained in, so that a trainer opened on them continues with the same bits.
        Adapters are merged into them, and beside them in a directory of their own.
        """
        whole = weights.gather_weights(self.model, is_tied=self.shape.is_tied)
        if dist.get_rank() == 0:
            if self.lora is not None:
                whole = lora.save_merged(whole, self.adapter, self.lora, out_dir)
            weights.write_weights(whole, self.adapter, out_dir)
            weights.copy_companions(source, out_dir, next(self.model.parameters()).dtype)
        dist.barrier()

    def save_train_state(self, out_dir: Path) -> None:
        """Write weights, optimizer, learning-rate schedule and step to `out_dir`, one file per rank."""
        train_state.save_train_state(out_dir, **self._stateful_parts())

    def load_train_state(self, in_dir: Path) -> None:
        """Continue where `save_train_state` left off, also with another number of ranks."""
        self.optimizers.zero_grad()
        train_state.load_train_state(in_dir, **self._stateful_parts())

    def save_weights(self, out_dir: Path) -> None:
        """Write the weights, as they are in training, to `out_dir`, one file per rank."""
        train_state.save_weights(out_dir, model=self.model, is_tied=self.shape.is_tied)

    def load_weights(self, in_dir: Path) -> None:
        """Take the weights that `save_weights` wrote; optimizer and step stay."""
        train_state.load_weights(in_dir, model=self.model, is_tied=self.shape.is_tied)

    def close(self) -> None:
        """Leave the process group; afterwards another trainer can be opened in this process."""
        super().close()
        stop_process_group()

    def _stateful_parts(self) -> dict:
        return {
            "model": self.model,
            "is_tied": self.shape.is_tied,
            "optimizers": self.optimizers,
            "lr_schedulers": self.lr_schedulers,
            "trainer": self,
        }

    def _query_tokens(self, micro_batch: TrainBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, both [n], of the n trained tokens in row-major order."""
        self.head.query = TokenQuery(micro_batch.mask, micro_batch.labels, temperature)
        try:
            logprobs, entropies = self.forward(micro_batch)
            return logprobs, entropies
        finally:
            self.head.query = None
