"""How completions are sampled, and which of them teach: settings of rollouts and of their scoring."""

from __future__ import annotations

from pydantic import Field

from forge_core.settings import Settings


class SamplingConfig(Settings):
    """How completions are sampled."""

    max_tokens: int = Field(16, ge=1, description="Longest completion, tokens")
    temperature: float = Field(1.0, ge=0, description="Softmax temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 keeps all")
    stop: tuple[str, ...] = Field((), description="Strings that end a completion")


class OverlongConfig(Settings):
    """A penalty that grows as a completion comes close to sampling.max_tokens (DAPO, arXiv:2503.14476)."""

    buffer_tokens: int = Field(ge=1, description="Tokens before the limit over which the penalty grows from 0 to full")
    penalty: float = Field(1.0, gt=0, description="Reward lost by a completion that reaches the limit")


class DynamicSamplingConfig(Settings):
    """Further prompts are sampled until prompts_per_iteration groups have a spread of rewards (DAPO).

    Spread is that of the rewards themselves: penalties for length or distance from the reference policy do not count.
    """

    max_generation_batches: int = Field(
        10, ge=1, description="Batches of prompts_per_iteration prompts per iteration; after them the run stops"
    )
