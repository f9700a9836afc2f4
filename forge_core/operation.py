"""How a run is operated: what stays warm, how long a stage may take, which files stay. It decides no result."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from forge_core.credentials import CredentialsError
from forge_core.settings import Settings


class WarmthConfig(Settings):
    """Which stage processes stay alive between jobs. The bytes they publish are the same either way."""

    trainer: bool = Field(True, description="Keep model and optimizer in memory between updates")
    generator: bool = Field(True, description="Keep the vLLM engine in memory between rollouts")
    scorer: bool = Field(True, description="Keep the scoring process alive")
    reference: bool = Field(True, description="Keep the reference policy in memory, where it has its own process")


class TimeLimitsConfig(Settings):
    """Seconds after which a stage's process is killed and the stage tried once more. Results do not depend on them."""

    dataset: float = Field(3600, gt=0, description="Seconds to materialise a dataset")
    overlap: float = Field(3600, gt=0, description="Seconds to compare training data with the evaluations")
    start: float = Field(3600, gt=0, description="Seconds to build or fetch the starting policy")
    sft: float = Field(24 * 3600, gt=0, description="Seconds of supervised fine-tuning")
    dpo: float = Field(24 * 3600, gt=0, description="Seconds of training on preference pairs")
    reward_model: float = Field(24 * 3600, gt=0, description="Seconds to train a reward model")
    rollout: float = Field(4 * 3600, gt=0, description="Seconds to sample one rollout set")
    merge: float = Field(3600, gt=0, description="Seconds to put the shards of one rollout set together")
    reference: float = Field(4 * 3600, gt=0, description="Seconds for the reference log-probs of one rollout set")
    score: float = Field(3600, gt=0, description="Seconds to score one rollout set")
    update: float = Field(4 * 3600, gt=0, description="Seconds of one update, replay included")
    evaluate: float = Field(4 * 3600, gt=0, description="Seconds of one evaluation")
    quantize: float = Field(4 * 3600, gt=0, description="Seconds to calibrate and quantize a policy")
    qat: float = Field(24 * 3600, gt=0, description="Seconds of quantization-aware training")
    speed: float = Field(3600, gt=0, description="Seconds to compare the speed of a policy and its quantized form")


class NotifyConfig(Settings):
    """Who hears of a run that was published, refused, skipped, or came to a bad end."""

    url_env: str | None = Field(
        None,
        json_schema_extra={"not": {"type": "string", "pattern": "://", "title": "an address; name the variable"}},
        description="Environment variable that holds the URL of a webhook, e.g. FORGE_WEBHOOK_URL; unset, nobody",
    )

    @field_validator("url_env", mode="before")
    @classmethod
    def _is_no_address(cls, value: object) -> object:
        if isinstance(value, str) and "://" in value:
            raise CredentialsError(
                "notify.url_env is an address; put it in the environment, and the variable's name here"
            )
        return value


class RetentionConfig(Settings):
    """Which policies and train states keep their files; forge_core/retention.py says which ones always do."""

    keep_last: int = Field(0, ge=0, description="Newest policies to keep, with two train states; 0 prunes nothing")
    keep_every: int = Field(0, ge=0, description="Also keep versions that are a multiple of this; 0 adds none")
    best_metric: str | None = Field(
        None,
        pattern=r"^eval/[a-z0-9_-]+/[a-z0-9_]+$",
        description="Also keep the version with the highest value of this metric, e.g. eval/heldout/accuracy",
    )

    @model_validator(mode="after")
    def _prunes_at_all(self) -> RetentionConfig:
        if self.keep_last == 0 and (self.keep_every or self.best_metric):
            raise ValueError(
                f"keep_every is {self.keep_every} and best_metric is {self.best_metric}, but keep_last is 0, which "
                "prunes nothing; set keep_last to 1 or more, or leave the others out"
            )
        return self
