"""What verl and TRL make of a batch: their own functions, called as their trainers call them."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

MAX_LENGTH = 12
Value = Callable[["Batch", Tensor], Tensor]  # of a batch and the new log-probs [B, L], with gradient in these


@dataclass(frozen=True)
class Batch:
    """Completions padded to one length; two or more to a group."""

    old: Tensor  # [B, L]
    new: Tensor
    reference: Tensor
    generator: Tensor
    advantages: Tensor  # [B]
    mask: Tensor  # [B, L] bool
    rewards: Tensor  # [B, 2]
    groups: Tensor  # [B]

    @property
    def total(self) -> Tensor:
        return self.rewards.sum(dim=1)

    @property
    def spread_advantages(self) -> Tensor:
        return self.advantages[:, None].expand(self.mask.shape)


def verl() -> dict[str, Value]:
    """By quantity, as verl 0.9 computes it; raises ImportError when it is not installed."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    actor = importlib.import_module("verl.workers.config").ActorConfig

    def loss(name: str, aggregation: str, **settings: float) -> Value:
        config = actor(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)

        def value(batch: Batch, new: Tensor) -> Tensor:
            function = core.get_policy_loss_fn(name)
            mask = batch.mask.float()
            return function(batch.old, new, batch.spread_advantages, mask, loss_agg_mode=aggregation, config=config)[0]

        return value

    def advantage(name: str, **settings: object) -> Value:
        def value(batch: Batch, new: Tensor) -> Tensor:
            mask = batch.mask.float()
            last = batch.mask.sum(dim=1) - 1
            rewards = torch.zeros_like(new.detach())
            rewards[torch.arange(len(new)), last] = batch.total
            given = {"token_level_rewards": rewards, "response_mask": mask, "index": batch.groups.numpy(), **settings}
            if name == "gdpo":
                ones = torch.ones(len(new), 1)
                given |= {
                    "config": {"gdpo_reward_keys": ["a", "b"]},
                    "non_tensor_batch": {"a": batch.rewards[:, 0].numpy(), "b": batch.rewards[:, 1].numpy()},
                    "batch": {"prompts": ones, "attention_mask": torch.cat([ones, mask], dim=1).long()},
                }
            if name == "reinforce_plus_plus":
                del given["index"]
            return core.get_adv_estimator_fn(name)(**given)[0][:, 0]  # the first token has one in every completion

        return value

    def estimate(name: str) -> Value:
        return lambda batch, new: core.kl_penalty(new, batch.reference, name)[batch.mask].mean()

    def correction(level: str, threshold: str | float) -> Value:
        def value(batch: Batch, new: Tensor) -> Tensor:
            mask = batch.mask.float()
            found, _ = helper.compute_rollout_correction_weights(
                batch.old - batch.generator, mask, rollout_is=level, rollout_is_threshold=threshold
            )
            return found * mask

        return value

    return {
        "grpo": loss("vanilla", "seq-mean-token-mean", clip_ratio_c=1e9),
        "dapo": loss("vanilla", "token-mean", clip_ratio_high=0.28, clip_ratio_c=1.3),
        "clip-higher, no dual clip": loss("vanilla", "token-mean", clip_ratio_high=0.28, clip_ratio_c=1e9),
        "dr_grpo": loss("vanilla", "seq-mean-token-sum-norm", clip_ratio_c=1e9),
        "cispo": loss("cispo", "token-mean", clip_ratio_low=1.0, clip_ratio_high=0.3),
        "gspo": loss("gspo", "seq-mean-token-mean", clip_ratio_low=0.03, clip_ratio_high=0.04),
        "sapo": loss("sapo", "seq-mean-token-mean"),
        "k1": estimate("k1"),
        "k2": estimate("k2"),
        "k3": estimate("k3"),
        "truncated weights, token": correction("token", 2.0),
        "truncated weights, sequence": correction("sequence", 2.0),
        "masked weights, token": correction("token", "0.5_2.0"),
        "group_zscore": advantage("grpo"),
        "group_mean": advantage("grpo", norm_adv_by_std_in_grpo=False),
        "leave_one_out": advantage("rloo"),
        "reinforce_pp": advantage("reinforce_plus_plus", config=SimpleNamespace(gamma=1.0)),
        "reinforce_pp_baseline": advantage("reinforce_plus_plus_baseline"),
        "gdpo": advantage("gdpo"),
    }


def trl() -> dict[str, Value]:
    """By quantity, as TRL 1.16 computes it: its trainer's method on a bare object with the attributes it looks at."""
    method = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss
    one_process = SimpleNamespace(
        num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor
    )

    def loss(kind: str, *, low: float = 0.2, high: float = 0.2, level: str = "token", beta: float = 0.0) -> Value:
        def value(batch: Batch, new: Tensor) -> Tensor:
            trainer = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
                _entropy_bonus_enabled=False,
                _metrics=defaultdict(lambda: defaultdict(list)),
                accelerator=one_process,
                args=SimpleNamespace(
                    delta=None,
                    sapo_temperature_pos=1.0,
                    sapo_temperature_neg=1.05,
                    steps_per_generation=1,
                    use_bias_correction_kl=False,
                ),
                aux_loss_enabled=False,
                beta=beta,
                current_gradient_accumulation_steps=1,
                epsilon_high=high,
                epsilon_low=low,
                importance_sampling_level=level,
                loss_type=kind,
                max_completion_length=MAX_LENGTH,
                model=SimpleNamespace(training=True),
                off_policy_mask_threshold=None,
                top_entropy_quantile=1.0,
                use_vllm=False,
            )
            ids = torch.ones(new.shape, dtype=torch.int64)
            inputs = {
                "prompt_ids": ids[:, :1],
                "prompt_mask": ids[:, :1],
                "completion_ids": ids,
                "completion_mask": batch.mask.long(),
                "advantages": torch.zeros_like(batch.advantages) if beta else batch.advantages,
                "old_per_token_logps": batch.old,
                "ref_per_token_logps": batch.reference,
                "num_items_in_batch": batch.mask.sum(),
            }
            return method(trainer, None, inputs)

        return value

    return {
        "grpo": loss("grpo"),
        "clip-higher, no dual clip": loss("dapo", high=0.28),
        "dr_grpo": loss("dr_grpo"),
        "cispo": loss("cispo", high=1.3),
        "gspo": loss("grpo", low=0.03, high=0.04, level="sequence"),
        "sapo": loss("sapo"),
        "k3": loss("bnpo", beta=1.0),  # with no advantage all that is left is the KL term
    }
