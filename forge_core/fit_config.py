"""Settings of training on a fixed dataset: supervised fine-tuning, preference pairs, reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from forge_core.data_config import DatasetConfig
from forge_core.settings import Settings
from forge_core.trainer_config import OptimizerConfig


class ValidationConfig(Settings):
    """Loss on examples that are not trained on."""

    dataset: DatasetConfig = Field(
        DatasetConfig(fn="arithmetic", kwargs={"split": "test"}), description="Examples of the validation loss"
    )
    num_examples: int = Field(256, ge=1, description="Examples used, the first ones of the dataset")
    every: int = Field(50, ge=1, description="Optimizer steps between validations; there is one before and one after")
    patience: int | None = Field(
        None, ge=1, description="Stop after so many validations in a row without a lower loss; None never does"
    )
    keep: Literal["best", "last"] = Field("best", description="Which weights are published, by validation loss")


class FitConfig(Settings):
    """What every training on a fixed dataset has."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="Examples to learn from")
    num_steps: int = Field(100, ge=0, description="Optimizer steps at most; 0 skips this stage")
    num_epochs: int | None = Field(
        None, ge=1, description="Passes over the dataset, in place of num_steps; the last batch may be short"
    )
    batch_size: int = Field(64, ge=1, description="Examples per optimizer step")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer of this stage")
    validation: ValidationConfig | None = Field(None, description="Measure a validation loss, and stop by it")
    stop_below_loss: float | None = Field(
        None, gt=0, description="Stop early, after the cool-down, once the smoothed training loss is below this"
    )
    cooldown_steps: int = Field(
        10, ge=0, description="Steps in which the learning rate falls linearly to 0 after stop_below_loss was reached"
    )
    checkpoint_every: int = Field(
        200, ge=1, description="Optimizer steps between snapshots that a killed stage goes on from"
    )

    def total_steps(self, num_examples: int) -> int:
        """Optimizer steps on a dataset of so many examples, unless something ends them early."""
        return self.num_steps if self.num_epochs is None else -(-self.num_epochs * num_examples // self.batch_size)

    def places(self, step: int, num_examples: int) -> tuple[int, int]:
        """First place of a step (0-based) in the endless stream of examples, and how many it takes."""
        start = step * self.batch_size
        if self.num_epochs is None:
            return start, self.batch_size
        return start, min(self.batch_size, self.num_epochs * num_examples - start)


class SftConfig(FitConfig):
    """Supervised fine-tuning on the assistant turns of a dataset."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="Chat examples to learn from")
    aggregation: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean", description="What a token counts in the loss of a batch: all the same, or conversations the same"
    )


class DpoConfig(FitConfig):
    """Direct preference optimisation (arXiv:2305.18290): of two answers, one made likelier than the other."""

    dataset: DatasetConfig = Field(
        default_factory=DatasetConfig,
        description="Pairs: conversations that end with the preferred answer, the other one in metadata.rejected",
    )
    beta: float = Field(0.1, gt=0, description="Strength of the tie to the starting policy, per nat")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of pairs that may be the wrong way round")
    optimizer: OptimizerConfig = Field(
        OptimizerConfig(learning_rate=5e-7, schedule="linear"), description="Optimizer of this stage"
    )


class RewardModelConfig(FitConfig):
    """A reward model after Bradley and Terry: of two answers, the preferred one gets the higher score."""

    dataset: DatasetConfig = Field(
        default_factory=DatasetConfig,
        description="Pairs: conversations that end with the preferred answer, the other one in metadata.rejected",
    )
    center_coefficient: float = Field(
        0.01, ge=0, description="Pull of the two scores' sum towards 0, by its square; their difference is free of it"
    )
    micro_batch_pairs: int = Field(8, ge=1, description="Pairs in one forward/backward pass")
