"""A policy version of another run as the starting policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import Kind
from forge_core.policy_uri import validate_policy_uri


def committed(uri: str, kind: Kind, source: Path) -> str:
    """URI of an artifact of this kind."""
    source.mkdir(exist_ok=True)
    empty: dict = {"job": {}, "job_digest": "d", "inputs": {}, "summary": {}, "software": {}, "timings": {}}
    return artifacts.commit(source, uri, kind=kind, **empty).uri


def test_a_policy_version_of_a_run_is_accepted(root: str, tmp_path: Path):
    validate_policy_uri(committed(f"{root}/run/policies/v0003", "policy", tmp_path / "files"))


def test_another_artifact_is_refused(root: str, tmp_path: Path):
    uri = committed(f"{root}/run/rollouts/v0003", "rollouts", tmp_path / "files")
    with pytest.raises(ValueError, match="is an artifact, but not a policy; give a policy version of a run"):
        validate_policy_uri(uri)


def test_a_pruned_version_is_refused(root: str, tmp_path: Path):
    uri = committed(f"{root}/run/policies/v0003", "policy", tmp_path / "files")
    storage.create_exclusive(f"{uri}/pruned.json", b"{}")
    with pytest.raises(ValueError, match="was pruned by retention; give a version whose files are left"):
        validate_policy_uri(uri)


def test_a_manifest_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(ValueError, match=r"manifest\.json that is not of an artifact"):
        validate_policy_uri(str(tmp_path))
