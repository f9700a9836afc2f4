"""What a run reads: problems or conversations, and how a chat template turns them into text."""

from __future__ import annotations

from pydantic import Field, JsonValue

from forge_core.settings import FunctionConfig, Settings


class DatasetConfig(FunctionConfig):
    """Problems to train or evaluate on."""

    fn: str = Field("arithmetic", description="Built-in dataset name, or package.module:function yielding Example")


class ChatConfig(Settings):
    """How messages become text: the same for SFT, rollouts and evaluations of a run."""

    template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict, description="Variables of the policy's chat template, e.g. {enable_thinking: false}"
    )
