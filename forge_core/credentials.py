"""Credentials in settings: refused before anything stores, logs or shows them.

Settings end up in Prefect's database, in MLflow and in manifests, and an error of pydantic repeats the value that is
wrong. So whoever writes `s3://key:secret@bucket` is told where credentials belong, without the value.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, JsonValue, model_validator

from forge_core.settings import Settings

REMEDY = "put them in the environment (AWS_ACCESS_KEY_ID, ...)"
# scheme://user:secret@, whose secret may hold slashes; http://host:8080/path@x is none.
_CREDENTIALS = r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/@\s:]*:(?!\d+/)[^@\s]*@"
# For Field(json_schema_extra=...): by it Prefect's server refuses the parameters of a run, and never stores them.
NO_CREDENTIALS: dict[str, JsonValue] = {
    "not": {"type": "string", "pattern": _CREDENTIALS, "title": f"a URI with credentials; {REMEDY}"}
}


class CredentialsError(RuntimeError):
    """A setting holds credentials. No ValueError: pydantic would wrap that, and show the value."""


class StoredSettings(Settings):
    """Settings that are stored with what they made, so that they must hold no credentials."""

    @model_validator(mode="before")
    @classmethod
    def _hold_no_credentials(cls, values: object) -> object:
        if (place := find_credentials(values)) is not None:
            raise CredentialsError(f"{place} holds credentials (user:secret@...); {REMEDY}")
        return values


def has_credentials(text: str) -> bool:
    """Whether a text holds a URI with a user and a secret."""
    return re.search(_CREDENTIALS, text) is not None


def find_credentials(values: object, place: str = "") -> str | None:
    """Dotted name of the first setting that holds credentials, None when there is none."""
    match values:
        case str():
            return (place or "a setting") if has_credentials(values) else None
        case dict():
            entries = values.items()
        case list() | tuple():
            entries = enumerate(values)
        case BaseModel():
            entries = values.__dict__.items()
        case _:
            return None
    found = (find_credentials(value, f"{place}.{name}" if place else str(name)) for name, value in entries)
    return next((one for one in found if one is not None), None)
