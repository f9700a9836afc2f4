"""What a run reads: problems or conversations, and how a chat template turns them into text."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from forge_core.settings import FunctionConfig, Settings

Order = Literal["shuffled", "easy_first"]


class DatasetConfig(FunctionConfig):
    """Problems to train or evaluate on."""

    fn: str = Field("arithmetic", description="Built-in dataset name, or package.module:function yielding Example")


class OverlapConfig(Settings):
    """Looking for held-out problems in the training data; docs/data.md says what counts."""

    num_words: int = Field(
        13, ge=0, description="Words in a row that make two prompts near; 0 looks for equal prompts alone"
    )
    max_fraction: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Stop when more than this share of an evaluation's problems is in the training data; none only "
        "reports it",
    )


class ChatConfig(Settings):
    """How messages become text: the same for SFT, rollouts and evaluations of a run."""

    template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Variables of the policy's chat template, e.g. {enable_thinking: false}"
    )
