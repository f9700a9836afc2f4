"""Calibration inside the RL loop: every n updates the newest policy is quantized on the newest rollouts."""

from __future__ import annotations

from forge_core.artifacts import Ref
from forge_core.config import PostTrainConfig
from forge_core.quantize_run import QuantizePlan, last_step_config, needed_sequences, num_sequences
from tasks import stages
from tasks.run import Run


class Recalibration:
    """What a training run knows of its quantized policies; does nothing when the config does not quantize."""

    def __init__(self, run: Run) -> None:
        config = run.plan.config
        settings = last_step_config(config) if isinstance(config, PostTrainConfig) else None
        self._run = run
        self._jobs = QuantizePlan(run.plan, settings) if settings is not None else None
        self._every = config.recalibrate_every if isinstance(config, PostTrainConfig) else 0
        self._previous: Ref | None = None

    def after_update(self, policy: Ref, rollouts: Ref, iteration: int) -> None:
        """Calibrate when it is time: ranges and the drift of the zero points since the last time become metrics.

        Raises ValueError when a rollout set has too few sequences.
        """
        if self._jobs is None or self._every == 0 or (iteration + 1) % self._every:
            return
        config = self._jobs.config
        count, needed = num_sequences([rollouts]), needed_sequences(config)
        if count < needed:
            raise ValueError(
                f"recalibrate_every is {self._every}, but an iteration samples {count} sequences and the calibration "
                f"needs {needed}; raise grpo.prompts_per_iteration, lower num_samples, or set recalibrate_every to 0"
            )
        quantized = stages.quantize(self._jobs.quantize(policy, rollouts=[rollouts], previous=self._previous))
        summary = self._run.tracker.record(quantized, iteration).summary
        drift = summary.get("quantize/zero_point_drift/max", 0.0)
        if drift >= config.quantize_gates.max_drift:
            self._run.logger.warning(
                "zero points drifted by %.3f of the range in %d updates, more than quantize_gates.max_drift (%g); what "
                "serves an older quantized policy should take %s",
                drift,
                self._every,
                config.quantize_gates.max_drift,
                quantized.uri,
            )
        self._previous = quantized
