"""Which software made an artifact."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path


def software_versions(*packages: str) -> dict[str, str]:
    """Installed versions of the packages that decide a stage's result, without importing them."""
    found = {}
    for package in packages:
        for name in (package, f"{package}-cpu"):
            try:
                found[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def git_revision() -> tuple[str, bool] | None:
    """The commit that this code is checked out at, and whether files differ from it; None outside of a checkout."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:  # installed, maybe inside another repository
        return None
    commit = _git("rev-parse", "HEAD")
    return None if commit is None else (commit, bool(_git("status", "--porcelain", "--untracked-files=no")))


def _git(*arguments: str) -> str | None:
    """What git says about the directory of this file, None when it refuses or is not there."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
