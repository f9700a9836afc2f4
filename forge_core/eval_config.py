"""Settings of an evaluation: which problems, how they are answered, and what counts as right."""

from __future__ import annotations

from pydantic import Field

from forge_core.data_config import DatasetConfig
from forge_core.sampling_config import SamplingConfig
from forge_core.settings import FunctionConfig, Settings


class EvalConfig(Settings):
    """A named evaluation on held-out problems. Nothing of it is taken from how rollouts are sampled."""

    name: str = Field("heldout", pattern=r"^[a-z0-9_-]+$", description="Name in paths and metrics")
    dataset: DatasetConfig = Field(
        DatasetConfig(fn="arithmetic", kwargs={"split": "test"}), description="Held-out problems"
    )
    num_examples: int = Field(200, ge=1, description="Problems evaluated, the first ones of the dataset")
    max_tokens: int = Field(16, ge=1, description="Longest completion, tokens")
    pass_k: int = Field(
        4, ge=1, description="Completions sampled per problem, for majority@k and pass@k with k = 1, 2, 4, ... up to it"
    )
    temperature: float = Field(1.0, gt=0, description="Temperature of the samples; accuracy itself is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass of the samples")
    top_k: int = Field(0, ge=0, description="Sample among the k most likely tokens; 0 for all")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion, greedy or sampled")
    reward: FunctionConfig = Field(FunctionConfig(fn="exact_number"), description="A completion is right at reward 1")
    reward_timeout_seconds: float = Field(
        10.0, gt=0, description="Seconds one call of the reward may take; after that its completion counts as wrong"
    )

    @property
    def greedy(self) -> SamplingConfig:
        """How the one answer is made that accuracy is about."""
        return SamplingConfig(max_tokens=self.max_tokens, temperature=0.0, stop=self.stop)

    @property
    def sampled(self) -> SamplingConfig:
        """How the `pass_k` samples are made."""
        return SamplingConfig(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop,
        )


def with_different_names(evals: tuple[EvalConfig, ...]) -> tuple[EvalConfig, ...]:
    """The evaluations as they are; raises ValueError when two have the same name, which is their place and metric."""
    names = [evaluation.name for evaluation in evals]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two evaluations are named {', '.join(repeated)}; give each its own name")
    return evals
