"""Settings of a server that follows a published name."""

from __future__ import annotations

from pydantic import Field

from forge_core.config import GeneratorConfig
from forge_core.credentials import NO_CREDENTIALS, StoredSettings


class ServeConfig(StoredSettings):
    """An OpenAI-compatible server of what `{root}/published/{name}` points at."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="Published name that is followed")
    root: str = Field(
        ".forge/store",
        description="Where artifacts live: a directory or any fsspec URI (s3://bucket/x)",
        json_schema_extra=NO_CREDENTIALS,
    )
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 is every one of the machine")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on")
    generator: GeneratorConfig = Field(
        default_factory=GeneratorConfig, description="The engine; as in the run, so that what is served was evaluated"
    )
    poll_seconds: float = Field(5.0, gt=0, description="Seconds between two looks at the pointer and at the server")
    start_timeout_seconds: float = Field(600.0, gt=0, description="Seconds a server has to become ready")
    unhealthy_seconds: float = Field(60.0, gt=0, description="Seconds without an answer before a server is restarted")
    drain_seconds: int = Field(10, ge=0, description="Seconds that requests in flight get before a server stops")
