"""Completions and their rewards as plain rows, for people to read; needs neither torch nor an engine."""

from __future__ import annotations

import json
from typing import Any

from safetensors.numpy import load

from forge_core import storage
from forge_core.artifacts import Manifest, Ref, resolve


def sample_completions(scored: Ref, count: int) -> list[dict[str, Any]]:
    """The first `count` completions of a scored rollout set with reward, advantage, and rewards by function."""
    manifest = resolve(scored)
    rollouts = resolve(manifest.inputs["rollouts"])
    lines = _read(rollouts, "rollouts.jsonl").decode().splitlines()[:count]
    numbers = load(_read(manifest, "scores.safetensors"))
    functions = [str(reward["fn"]).rpartition(":")[2] for reward in _rewards(manifest)]
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
                "rewards": dict(zip(functions, map(float, numbers["rewards"][index]), strict=True)),
            }
        )
    return rows


def _rewards(scored: Manifest) -> list[dict[str, Any]]:
    rewards = scored.job["rewards"]
    assert isinstance(rewards, list)
    return rewards  # type: ignore[return-value]


def _read(manifest: Manifest, name: str) -> bytes:
    return storage.read_bytes(f"{manifest.files_uri}/{name}")
