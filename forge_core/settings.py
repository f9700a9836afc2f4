"""The base of every settings model, and the setting that names a function."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class Settings(BaseModel):
    """Base of every settings model: immutable, and a misspelt field is an error rather than a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FunctionConfig(Settings):
    """A function named by a built-in short name or `package.module:function`, with its keyword arguments."""

    fn: str = Field(description="Built-in short name, or package.module:function")
    kwargs: dict[str, JsonValue] = Field(default_factory=dict, description="Keyword arguments of the function")
