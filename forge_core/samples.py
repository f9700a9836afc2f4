"""Completions and their rewards as plain rows, for people to read; needs neither torch nor an engine."""

from __future__ import annotations

import json

from safetensors.numpy import load

from forge_core import storage
from forge_core.artifacts import Manifest, Ref, resolve


def sample_completions(scored: Ref, count: int) -> list[dict[str, str | float | bool]]:
    """The first `count` completions of a scored rollout set with their total reward and advantage."""
    manifest = resolve(scored)
    rollouts = resolve(manifest.inputs["rollouts"])
    lines = _read(rollouts, "rollouts.jsonl").decode().splitlines()[:count]
    numbers = load(_read(manifest, "scores.safetensors"))
    rows = []
    for index, row in enumerate(json.loads(line) for line in lines):
        rows.append(
            {
                "prompt": row["example"]["messages"][0]["content"],
                "completion": row["completion"],
                "answer": row["example"]["answer"],
                "finish_reason": row["finish_reason"],
                "reward": float(numbers["total"][index]),
                "advantage": float(numbers["advantages"][index]),
            }
        )
    return rows


def _read(manifest: Manifest, name: str) -> bytes:
    return storage.read_bytes(f"{manifest.files_uri}/{name}")
