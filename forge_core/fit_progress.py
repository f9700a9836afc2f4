"""How far a training on a fixed dataset has come: all that decides its next step, apart from weights and optimizer."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from forge_core.fit_config import FitConfig

logger = logging.getLogger(__name__)

SMOOTHING = 0.8  # of the training loss that stop_below_loss is compared with


class Validation(BaseModel):
    """A validation, after so many steps."""

    step: int
    loss: float
    metrics: dict[str, float] = Field(default_factory=dict)


class Progress(BaseModel):
    """The steps taken, and what their losses have decided. Stored beside a snapshot as JSON, which keeps every bit."""

    model_config = ConfigDict(extra="forbid")

    stop_at: int = Field(description="Steps in all, as decided so far")
    steps: list[dict[str, float]] = Field(default_factory=list, description="Metrics of each optimizer step")
    validations: list[Validation] = Field(default_factory=list)
    smoothed_loss: float | None = None
    is_cooling: bool = False
    best: Validation | None = Field(None, description="The validation with the lowest loss, the first of equals")

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return len(self.steps)

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return self.num_steps >= self.stop_at

    def add_step(self, metrics: dict[str, float], settings: FitConfig) -> None:
        """After an optimizer step: a loss that is low enough ends the training after its cool-down."""
        self.steps.append(metrics)
        loss = metrics["loss/policy"]
        before = loss if self.smoothed_loss is None else self.smoothed_loss
        self.smoothed_loss = SMOOTHING * before + (1 - SMOOTHING) * loss
        mark = settings.stop_below_loss
        if mark is not None and not self.is_cooling and self.smoothed_loss < mark:
            self.is_cooling = True
            self.stop_at = min(self.num_steps + settings.cooldown_steps, self.stop_at)
            logger.info("loss %.3f is below %.3f: stopping at step %d", self.smoothed_loss, mark, self.stop_at)

    def add_validation(self, validation: Validation, settings: FitConfig) -> bool:
        """After a validation; whether it is the best so far. So many in a row that are not end the training."""
        self.validations.append(validation)
        is_best = self.best is None or validation.loss < self.best.loss
        if is_best:
            self.best = validation
        assert settings.validation is not None
        assert self.best is not None
        patience = settings.validation.patience
        num_worse = sum(later.step > self.best.step for later in self.validations)
        if patience is not None and num_worse >= patience and not self.is_done:
            logger.info(
                "validation loss %.4f of step %d was not reached in %d validations: stopping at step %d",
                self.best.loss,
                self.best.step,
                num_worse,
                self.num_steps,
            )
            self.stop_at = self.num_steps
        return is_best

    def wants_validation(self, settings: FitConfig) -> bool:
        """Whether one is due after the steps taken so far: before the first step, every so many, and after the last."""
        if settings.validation is None or (self.validations and self.validations[-1].step == self.num_steps):
            return False
        return self.num_steps % settings.validation.every == 0 or self.is_done

    def cooling_factor(self, settings: FitConfig) -> float | None:
        """What the learning rate of the next step counts in the cool-down, falling linearly to 0; None before it."""
        if not self.is_cooling:
            return None
        return (self.stop_at - self.num_steps) / (settings.cooldown_steps + 1)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json())

    @classmethod
    def load(cls, path: Path) -> Progress:
        """Read what `save` wrote."""
        return cls.model_validate_json(path.read_text())
