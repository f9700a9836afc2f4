"""Where MLflow is."""

from __future__ import annotations

import os
from pathlib import Path


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, or a local SQLite file when it is not set."""
    configured = os.environ.get("MLFLOW_TRACKING_URI")
    if configured:
        return configured
    return f"sqlite:///{local_home() / 'mlflow.db'}"


def local_home() -> Path:
    """The directory of local data, created when missing."""
    home = Path(".forge").absolute()
    home.mkdir(exist_ok=True)
    return home
