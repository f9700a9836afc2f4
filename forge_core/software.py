"""Which software made an artifact."""

from __future__ import annotations

import importlib.metadata


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
