"""How an update learns from scored rollouts: settings that a run's config and the jobs of its updates share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forge_core.settings import FunctionConfig, Settings

Aggregation = Literal["token_mean", "sequence_mean", "fixed_horizon"]
Estimator = Literal["k1", "k2", "k3", "k3_ratio"]


class CorrectionConfig(Settings):
    """Importance weights w = p_trainer / p_generator of the policy loss, for engines that disagree on a policy."""

    method: Literal["truncate", "mask"] = Field(
        "truncate",
        description="truncate: w within [low, high] (truncated importance sampling); mask: w where it lies within, "
        "and 0 elsewhere (IcePop)",
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="Weights of single tokens, or one of the whole completion (the product over its tokens)"
    )
    low: float = Field(0.0, ge=0, description="Smallest weight; 0.5 is usual for mask")
    high: float = Field(2.0, gt=0, description="Largest weight; 2 is usual for truncate, 5 for mask")

    @model_validator(mode="after")
    def _is_a_range(self) -> CorrectionConfig:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high is {self.high}; low must be the smaller one")
        return self


class KlConfig(Settings):
    """A penalty for leaving the reference policy: the one that reinforcement learning starts from, frozen."""

    coefficient: float = Field(ge=0, description="Weight of the penalty per nat; 0 only measures the distance")
    place: Literal["loss", "reward"] = Field(
        "loss", description="loss: a term of every token; reward: the sum over a completion lowers its reward"
    )
    estimator: Estimator | None = Field(
        None, description="Of the KL divergence (see forge_core/kl.py); k3_ratio in the loss, k1 in the reward if unset"
    )

    @model_validator(mode="after")
    def _has_the_right_gradient(self) -> KlConfig:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError("kl.estimator is k1, which has no expected gradient in a loss; use k3_ratio, k2 or k3")
        if self.place == "reward" and self.estimator == "k3_ratio":
            raise ValueError("kl.estimator is k3_ratio, but rewards belong to the policy that sampled; use k1")
        return self

    @property
    def estimated_by(self) -> Estimator:
        """The estimator, whether it was named or not."""
        return self.estimator or ("k3_ratio" if self.place == "loss" else "k1")


class UpdateConfig(Settings):
    """What is minimised, in how many steps, and relative to which log-probabilities."""

    loss: FunctionConfig = Field(FunctionConfig(fn="grpo"), description="Per-token policy loss")
    aggregation: Aggregation = Field(
        "token_mean",
        description="How tokens add up to the loss of a minibatch: token_mean counts every token the same, "
        "sequence_mean every completion; fixed_horizon divides by completions times sampling.max_tokens",
    )
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass over a rollout set, each on its own groups")
    epochs: int = Field(1, ge=1, description="Passes over each rollout set")
    proximal: Literal["generator", "trainer"] = Field(
        "generator",
        description="Whose log-probs the loss compares the policy with: those recorded by the generator, or those the "
        "trainer computes before the first step of an update (one more forward pass)",
    )
    correction: CorrectionConfig | None = Field(
        None, description="Importance weights for trainer/generator mismatch; needs proximal: trainer"
    )
    kl: KlConfig | None = Field(None, description="Distance to a frozen reference policy, measured and penalised")
    entropy_coefficient: float = Field(
        0.0, ge=0, description="Reward for entropy, nats per token, subtracted from the loss; 0 costs nothing"
    )

    @model_validator(mode="after")
    def _has_log_probs_to_correct_by(self) -> UpdateConfig:
        if self.correction is not None and self.proximal != "trainer":
            raise ValueError(
                f"correction is set and proximal is {self.proximal!r}; the weights compare the trainer's log-probs "
                "with the generator's, so set proximal to 'trainer' or leave correction out"
            )
        return self
