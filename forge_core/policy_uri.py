"""Checks a `policy.uri` without importing torch or transformers: a flow refuses it before any engine starts."""

from __future__ import annotations

import difflib
import re

import fsspec

from forge_core import storage
from forge_core.artifacts import ArtifactError, is_pruned, read_manifest
from forge_core.credentials import has_credentials

# org/name with an optional branch, tag or commit, the form huggingface_hub accepts.
HF_URI = re.compile(r"^hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?$")
FRESH_URI = "fresh://qwen3"
SUPPORTED_URIS = (
    "fresh://qwen3, hf://org/name[@revision], a Hugging Face directory, a policy version of a run or a .gguf file"
)


def validate_policy_uri(uri: str) -> None:
    """Raises ValueError unless `uri` has a known form and, where that is cheap to see, something to load.

    A hub name is checked for its form only; a directory must hold a config.json; a .gguf file must exist.
    """
    if uri == FRESH_URI or HF_URI.match(uri):
        return
    if uri.startswith("fresh://"):
        raise policy_error(uri, "names no built-in shape", f"use {FRESH_URI} and set policy.fresh for its sizes")
    if uri.startswith("hf://"):
        raise policy_error(uri, "is not a model on the Hugging Face hub", "write hf://org/name[@revision]")
    if has_credentials(uri) or re.search("://[^/]*@", uri):
        raise policy_error(uri, "holds credentials", "put them in the environment (AWS_ACCESS_KEY_ID, ...)")
    _check_scheme(uri)
    try:
        _check_content(uri)
    except (ImportError, OSError) as error:
        raise policy_error(uri, f"cannot be read ({error})", "check path, credentials and network") from error


def policy_error(uri: str, problem: str, remedy: str) -> ValueError:
    """The error for a policy that cannot be used, with any credentials in the URI left out."""
    shown = re.sub(r"://.*@" if has_credentials(uri) else r"://[^/@]+@", "://***@", uri)
    return ValueError(f"policy.uri is {shown}, which {problem}; {remedy}")


def _check_scheme(uri: str) -> None:
    protocol = uri.split("://")[0] if "://" in uri else "file"
    known = fsspec.available_protocols()
    if protocol not in known:
        close = difflib.get_close_matches(protocol, ["fresh", *known])
        hint = f"did you mean {' or '.join(close)}?" if close else f"use {SUPPORTED_URIS}"
        raise policy_error(uri, f"has the unknown scheme {protocol}", hint)


def _check_content(uri: str) -> None:
    fs, path = storage.filesystem(uri)
    if uri.endswith(".gguf"):
        if not fs.isfile(path):
            raise policy_error(uri, "does not exist or is not a file", "check the path and the credentials")
    elif storage.exists(f"{uri}/manifest.json"):
        _check_artifact(uri)
    elif not fs.exists(path):
        raise policy_error(uri, "does not exist", f"check the path and the credentials, or use {SUPPORTED_URIS}")
    elif not storage.exists(f"{uri}/config.json"):
        raise policy_error(uri, "has no config.json", "give a directory written by save_pretrained, or a .gguf file")


def _check_artifact(uri: str) -> None:
    remedy = "give a policy version of a run, {root}/{run_id}/policies/v0003"
    try:
        manifest = read_manifest(uri)
    except ArtifactError as error:
        raise policy_error(uri, "has a manifest.json that is not of an artifact", remedy) from error
    if manifest is None or manifest.kind != "policy":
        raise policy_error(uri, "is an artifact, but not a policy", remedy)
    if is_pruned(uri):
        raise policy_error(uri, "was pruned by retention", "give a version whose files are left, or replay the run")
