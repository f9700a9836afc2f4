"""How a policy is quantized: the scheme, the calibration, the gates. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from forge_core.settings import Settings

Scheme = Literal["w8a16", "w8a8_dynamic", "w8a8_static", "w4a16", "fp8"]
Remedy = Literal["report", "clip", "smooth", "keep", "resample"]
WEIGHT_ONLY: tuple[Scheme, ...] = ("w8a16", "w4a16")
MIN_SAMPLES, MAX_SAMPLES = 128, 512


class SchemeConfig(Settings):
    """Which numbers a Linear layer computes with."""

    name: Scheme = Field(
        "w8a8_dynamic",
        description="Weights and activations: w8a16 and w4a16 quantize weights alone; w8a8_dynamic scales activations "
        "for each token; w8a8_static by calibration; fp8 is float8 on both sides, for GPUs",
    )
    weights_per: Literal["channel", "tensor", "group"] = Field(
        "channel", description="What shares one scale: an output channel, a whole weight, or group_size inputs of one"
    )
    group_size: int = Field(64, ge=2, description="Inputs that share a scale, where weights_per is group")
    symmetric_weights: bool = Field(True, description="Weights without a zero point; false for w8a16 and w4a16 only")
    symmetric_activations: bool = Field(True, description="Activations without a zero point; false for w8a8_* only")
    weight_range: Literal["minmax", "mse"] = Field(
        "minmax", description="Range of a weight's scale: all of it, or the part that gives the least squared error"
    )

    @property
    def bits(self) -> int:
        """Bits of one weight."""
        return 4 if self.name == "w4a16" else 8

    @model_validator(mode="before")
    @classmethod
    def _four_bits_come_in_groups(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("name") == "w4a16":
            return {"weights_per": "group", **values}
        return values

    @model_validator(mode="after")
    def _engines_can_load_it(self) -> SchemeConfig:
        if self.weights_per == "group" and self.name not in WEIGHT_ONLY:
            raise ValueError(
                f"weights_per is group, but {self.name} multiplies 8-bit numbers with one scale per channel or tensor; "
                "use channel, or the scheme w4a16"
            )
        if self.weights_per == "tensor" and self.name in WEIGHT_ONLY:
            raise ValueError(f"weights_per is tensor, which no {self.name} kernel of vLLM takes; use channel or group")
        if not self.symmetric_weights and self.name not in WEIGHT_ONLY:
            raise ValueError(
                f"symmetric_weights is false, but the kernels of {self.name} have no zero points of weights; use true"
            )
        if not self.symmetric_activations and self.name not in ("w8a8_dynamic", "w8a8_static"):
            raise ValueError(f"symmetric_activations is false, but {self.name} has no integer activations; use true")
        return self


class CalibrationConfig(Settings):
    """What activations are recorded on, and how their ranges are drawn."""

    num_samples: int = Field(320, ge=1, description="Sequences, 128 to 512 unless force_num_samples")
    force_num_samples: bool = Field(False, description="Accept fewer than 128 or more than 512 samples")
    num_heldout: int = Field(64, ge=1, description="Further sequences, of other prompts, on which errors are measured")
    batch_size: int = Field(32, ge=1, description="Sequences in one forward pass")
    num_iterations: int = Field(10, ge=1, description="Batches: 10 of 32 are 320 samples, and 128 samples are only 4")
    when_exhausted: Literal["stop", "go_round"] = Field(
        "stop",
        description="When the samples end before num_iterations: stop, or begin again; the same samples again move "
        "only a moving average",
    )
    observer: Literal["minmax", "moving_average", "percentile", "mse"] = Field(
        "minmax", description="How the range of a layer's activations follows from what was recorded"
    )
    percentile: float = Field(
        99.9, gt=50, le=100, description="Share of the values, %, inside of the range of `percentile` and of `clip`"
    )
    averaging: float = Field(0.1, gt=0, le=1, description="Weight of a new batch in `moving_average`")
    flag_sigmas: float = Field(
        10.0, gt=0, description="A layer whose activations span more than this many standard deviations is flagged"
    )
    remedy: Literal["auto"] | Remedy = Field(
        "auto",
        description="For flagged layers: report only; clip to the percentile; smooth moves scale from activations into "
        "weights (arXiv:2211.10438), exact, and keeps what it cannot reach in high precision; keep them in high "
        "precision; resample other sequences. auto smooths where activations are quantized and reports elsewhere",
    )
    smoothing: float = Field(0.5, ge=0, le=1, description="Share of the scale that `smooth` moves into the weights")
    max_resamples: int = Field(3, ge=1, description="Draws of `resample`, of which the one with fewest flags counts")

    @model_validator(mode="after")
    def _number_of_samples_is_sensible(self) -> CalibrationConfig:
        if not self.force_num_samples and not MIN_SAMPLES <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(
                f"num_samples is {self.num_samples}, outside of {MIN_SAMPLES}-{MAX_SAMPLES}: fewer miss the rare large "
                "activations, more cost time and change little; set force_num_samples to go there all the same"
            )
        return self


class QuantizeGatesConfig(Settings):
    """What a quantized policy must reach before it is published."""

    max_mae: float = Field(
        0.01, gt=0, description="Mean absolute error of the next-token probabilities on held-out sequences"
    )
    max_accuracy_drop: float = Field(0.02, ge=0, description="Accuracy lost on the same problems, 0.02 is 2 points")
    require_confidence: bool = Field(
        False, description="Let the upper end of the paired 95 % interval of the drop count, not the drop itself"
    )
    max_drift: float = Field(
        0.05, gt=0, description="Zero points moved since the previous calibration, as a share of the quantized range"
    )


class QuantizeConfig(Settings):
    """Post-training quantization of the Linear layers of a policy."""

    scheme: SchemeConfig = Field(default_factory=SchemeConfig, description="Which numbers a layer computes with")
    keep: tuple[str, ...] = Field(
        ("lm_head",),
        description="Layers left in high precision: names or patterns, e.g. model.layers.0.*; embeddings always are",
    )
    mixed: Literal["none", "auto"] = Field(
        "none",
        description="auto: the layers with the noisiest outputs stay in high precision, as few as bring the mean "
        "absolute error of the next-token probabilities within its gate",
    )
    calibration: CalibrationConfig = Field(default_factory=CalibrationConfig, description="Recorded activations")

    @property
    def remedy(self) -> Remedy:
        """What is done about flagged layers."""
        if self.calibration.remedy != "auto":
            return self.calibration.remedy
        return "report" if self.scheme.name in WEIGHT_ONLY else "smooth"

    @model_validator(mode="after")
    def _remedy_has_an_effect(self) -> QuantizeConfig:
        remedy, name = self.calibration.remedy, self.scheme.name
        if remedy == "clip" and name != "w8a8_static":
            raise ValueError(
                f"calibration.remedy is clip, but {name} has no calibrated range to clip; use smooth, keep or report"
            )
        if remedy == "smooth" and name in WEIGHT_ONLY:
            raise ValueError(
                f"calibration.remedy is smooth, which eases activations at the expense of weights, but {name} "
                "quantizes weights alone; use keep or report"
            )
        if remedy == "resample" and name != "w8a8_static":
            raise ValueError(
                f"calibration.remedy is resample, but {name} computes with nothing that was sampled; use keep or report"
            )
        return self
