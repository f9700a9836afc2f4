"""What comes from elsewhere (manifests, policies, settings) is data: it leads to no other files and runs no code."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from forge_core import artifacts, storage
from forge_core.artifacts import ArtifactError, Manifest, Ref
from forge_core.chat import load_tokenizer
from forge_core.config import FreshPolicyConfig, PolicyConfig
from forge_core.manifests import ManifestReader
from forge_core.policies import build_fresh_policy, import_policy, read_tensor_headers

REPO = Path(__file__).parents[2]
PLACES = ("forge_core", "flows", "tasks", "deployments")
SOURCES = sorted(path for place in PLACES for path in (REPO / place).rglob("*.py"))
PICKLERS = ("pickle", "marshal", "shelve", "dill", "cloudpickle")
# One runs programs on purpose, with the kernel's help; the other is the unpickler that lets nothing through.
ALLOWED = ("forge_core/rewards/sandbox_child.py", "forge_core/trainer/plain_checkpoint.py")
SHAPE = FreshPolicyConfig(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)


def committed(tmp_path: Path, root: str) -> Manifest:
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "file").write_text("x")
    return artifacts.commit(
        directory, f"{root}/x", kind="policy", job={}, job_digest="d", inputs={}, summary={}, software={}, timings={}
    )  # fmt: skip


def rewrite(manifest: Manifest, **changes: object) -> Ref:
    """Replace a manifest by one that somebody else has written; the reference still fits."""
    content = manifest.model_dump(mode="json") | changes
    storage.write_atomic(f"{manifest.uri}/manifest.json", json.dumps(content).encode())
    return manifest.ref


@pytest.mark.parametrize("path", ["../../planted", "/etc/planted", "a/../../planted", "a//b", ".", "", "..\\planted"])
def test_a_manifest_whose_files_lead_elsewhere_is_refused(path: str, root: str, tmp_path: Path):
    manifest = committed(tmp_path, root)
    ref = rewrite(manifest, files=[{"path": path, "num_bytes": 1, "sha256": "0"}])
    with pytest.raises(ArtifactError, match="leads out of the artifact"):
        artifacts.fetch(ref, tmp_path / "scratch")
    assert isinstance(ManifestReader().get(ref.uri), ArtifactError)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("attempt", ["..", "../other", "a/b", ""])
def test_a_manifest_whose_attempt_is_not_one_name_is_refused(attempt: str, root: str, tmp_path: Path):
    ref = rewrite(committed(tmp_path, root), attempt=attempt)
    with pytest.raises(ArtifactError, match=r"leads out of the artifact|is not the name of an attempt"):
        artifacts.fetch(ref, tmp_path / "scratch")


def test_a_manifest_that_says_it_lies_elsewhere_is_refused(root: str, tmp_path: Path):
    ref = rewrite(committed(tmp_path, root), uri="file:///etc")
    with pytest.raises(ArtifactError, match="has the manifest of file:///etc"):
        artifacts.fetch(ref, tmp_path / "scratch")


def test_an_index_of_weights_that_leads_elsewhere_is_refused(tmp_path: Path):
    build_fresh_policy(tmp_path / "policy", SHAPE, 0)
    shutil.copy(tmp_path / "policy" / "model.safetensors", tmp_path / "other.safetensors")
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (tmp_path / "policy" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names \.\./other.safetensors, which is no file beside it"):
        read_tensor_headers(tmp_path / "policy")


def test_code_that_comes_with_a_policy_is_neither_copied_nor_run(tmp_path: Path):
    source, out, marker = tmp_path / "source", tmp_path / "out", tmp_path / "ran"
    build_fresh_policy(source, SHAPE, 0)
    (source / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for name, entry in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((source / name).read_text())
        remote = ["evil.Evil", None] if entry == "AutoTokenizer" else "evil.Evil"
        (source / name).write_text(json.dumps(content | {"auto_map": {entry: remote}}))
    import_policy(PolicyConfig(uri=str(source)), out, seed=0, scratch=tmp_path / "scratch")
    assert load_tokenizer(source) is not None  # also where the code lies beside it
    assert not (out / "evil.py").exists()
    assert not marker.exists()


def test_nothing_unpickles_evaluates_or_trusts_remote_code():
    wrong = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in SOURCES
        if str(path.relative_to(REPO)) not in ALLOWED
        for node in ast.walk(ast.parse(path.read_text()))
        if is_dangerous(node)
    ]
    assert wrong == []


def is_dangerous(node: ast.AST) -> bool:
    """An import of a pickler, a call that runs text as code, or an argument that lets others do so."""
    match node:
        case ast.Import(names=names):
            return any(name.name in PICKLERS for name in names)
        case ast.ImportFrom(module=module) if module in PICKLERS:
            return True
        case ast.Call(func=ast.Name(id="eval" | "exec")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="yaml"), attr="load" | "unsafe_load" | "full_load")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
            return not any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in keywords)
        case ast.keyword(arg="trust_remote_code" | "allow_pickle" | "shell", value=ast.Constant(value=True)):
            return True
    return False
