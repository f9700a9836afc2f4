"""The base of every settings model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every settings model: immutable, and a misspelt field is an error rather than a silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid")
