"""Datasets and policies through the hub's own client, over HTTP, from a mirror on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.config import FreshPolicyConfig
from forge_core.policies import build_fresh_policy
from forge_core.storage import sha256_file
from tests.hub_mirror import hub_mirror

SHAPE = FreshPolicyConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
READ = """
import json, sys
from forge_core.datasets import hub
fields = {"question": "problem", "answer": "solution"}
for part in ("train", "test"):
    print(json.dumps([[one.messages[0].content, one.answer] for one in hub(name="org/sums", part=part, fields=fields)]))
"""
IMPORT = """
import sys
from pathlib import Path
from forge_core.config import PolicyConfig
from forge_core.policies import import_policy
out_dir = Path(sys.argv[2])
out_dir.mkdir()
import_policy(PolicyConfig(uri=sys.argv[1]), out_dir, seed=0, scratch=out_dir)
"""


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that has nothing in its cache and takes the mirror for the hub."""
    sums = tmp_path / "hub" / "datasets" / "org" / "sums"
    sums.mkdir(parents=True)
    (sums / "train.jsonl").write_text('{"problem": "1+1=", "solution": "2"}\n{"problem": "2+2=", "solution": "4"}\n')
    (sums / "test.jsonl").write_text('{"problem": "3+3=", "solution": "6"}\n')
    build_fresh_policy(tmp_path / "hub" / "models" / "org" / "tiny", SHAPE, seed=0)
    with hub_mirror(tmp_path / "hub") as url:
        yield os.environ | {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}


def run(code: str, *arguments: str, mirror: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], env=mirror, capture_output=True, text=True)


def test_a_dataset_of_the_hub_is_streamed_part_by_part(mirror: dict[str, str]):
    done = run(READ, mirror=mirror)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[["1+1=", "2"], ["2+2=", "4"]], [["3+3=", "6"]]]


def test_a_policy_of_the_hub_is_imported_with_its_very_weights(mirror: dict[str, str], tmp_path: Path):
    done = run(IMPORT, "hf://org/tiny@main", str(tmp_path / "policy"), mirror=mirror)
    assert done.returncode == 0, done.stderr
    name = "model.safetensors"
    assert sha256_file(tmp_path / "policy" / name) == sha256_file(tmp_path / "hub/models/org/tiny" / name)
    assert (tmp_path / "policy" / "tokenizer.json").exists()


def test_a_policy_that_the_hub_does_not_have_is_an_error_with_its_remedy(mirror: dict[str, str], tmp_path: Path):
    done = run(IMPORT, "hf://org/missing", str(tmp_path / "policy"), mirror=mirror)
    assert "policy.uri is hf://org/missing" in done.stderr
    assert "check the name" in done.stderr
