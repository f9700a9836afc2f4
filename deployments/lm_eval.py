"""Benchmarks of a policy by EleutherAI's lm-evaluation-harness: `forge eval-harness`.

The policy is served by `vllm serve` on a free port of this machine, the harness asks it over HTTP, and its results are
committed as `{run}/evals/{version}/lm-eval-{digest}`. The package lm_eval is not among our requirements; it may live in
an environment of its own, whose interpreter is then named by `python`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from deployments.local_service import Service, answers, child_environment, free_port, start, wait_ready
from forge_core import artifacts
from forge_core.artifacts import Manifest, Ref, sha256_json
from forge_core.manifests import run_of
from forge_core.settings import Settings
from forge_core.software import software_versions

MODEL = "policy"  # its name over HTTP
MAX_KV_CACHE = 2**30  # bytes, on a CPU
_VERSIONS = "from importlib.metadata import version; print(version({!r}))"


class HarnessSettings(Settings):
    """What decides the results, besides the policy."""

    tasks: tuple[str, ...] = Field(min_length=1, description="Tasks or groups of the harness")
    is_chat: bool = Field(False, description="Ask through the chat template of the policy, and not with bare text")
    num_fewshot: int | None = Field(None, ge=0, description="Worked examples in the prompt; the task's own if unset")
    limit: int | None = Field(None, ge=1, description="Problems of each task; all of them if unset")
    max_model_len: int | None = Field(None, ge=8, description="Longest prompt plus completion; the policy's if unset")
    seed: int = Field(0, ge=0, description="Of the choice of worked examples, and of sampling where a task samples")
    task_files_sha256: str | None = Field(None, description="Of your own task files")


def evaluate(
    policy: Ref,
    settings: HarnessSettings,
    *,
    python: str = sys.executable,
    include_path: Path | None = None,
    num_concurrent: int = 32,
) -> Manifest:
    """The committed results of a policy; asked for a second time, they are found.

    `python` is the interpreter that has lm_eval, `include_path` a directory of your own tasks. Raises ValueError when
    the policy is none, RuntimeError when lm_eval is missing or fails.
    """
    if policy.kind not in ("policy", "quantized_policy"):
        raise ValueError(f"{policy.uri} is a {policy.kind}; only a policy can be served")
    software = {"lm_eval": installed_version(python)}
    software |= software_versions("vllm")
    if include_path is not None:
        settings = settings.model_copy(update={"task_files_sha256": _sha256_of(include_path)})
    job: dict[str, JsonValue] = {"stage": "lm_eval", "settings": settings.model_dump(mode="json")}
    digest = sha256_json([job, policy.digest, software])
    uri = f"{run_of(policy.uri)}/evals/{policy.uri.rpartition('/')[2]}/lm-eval-{digest[:8]}"
    if (found := artifacts.read_manifest(uri)) is not None:
        return found
    with tempfile.TemporaryDirectory() as name:
        scratch, results = Path(name), Path(name) / "results"
        _, hf_dir = artifacts.fetch(policy, scratch)
        results.mkdir()
        started = time.perf_counter()
        with serve(hf_dir, scratch / "server", settings) as server:
            wait_ready(server)
            ready = time.perf_counter()
            ask(harness_command(python, server.url, settings, results, include_path, num_concurrent), server)
        timings = {"load": ready - started, "evaluate": time.perf_counter() - ready}
        committed = collected(results, scratch / "committed")
        return artifacts.commit(
            committed,
            uri,
            kind="eval",
            job=job,
            job_digest=digest,
            inputs={"policy": policy},
            summary=metrics(json.loads((committed / "results.json").read_text())),
            software=software,
            timings=timings,
        )


def installed_version(python: str) -> str:
    """Version of lm_eval in an environment; raises RuntimeError with the remedy when it has none."""
    if found := _version(python, "lm_eval"):
        return found
    raise RuntimeError(
        f"{python} has no package lm_eval, which is not among our requirements; give it an environment of its own and "
        "name its interpreter: python -m venv .lm-eval && .lm-eval/bin/pip install 'lm_eval[api]', then add "
        "--python .lm-eval/bin/python"
    )


def serve(hf_dir: Path, home: Path, settings: HarnessSettings) -> Service:
    """A vLLM server of a policy on a free port of this machine."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # What `vllm serve` starts; the command itself wants a package of the name vllm, which a CPU build has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(hf_dir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
    command += ["--seed", str(settings.seed)]
    command += ["--enable-tokenizer-info-endpoint"]  # the harness counts tokens by asking, and needs no transformers
    if settings.max_model_len is not None:
        command += ["--max-model-len", str(settings.max_model_len)]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"}
    if shutil.which("nvidia-smi") is None:
        # As forge_core.generator does: float32, threads left to the machine, and nothing compiled, the sampler neither.
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(MAX_KV_CACHE)]
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    return start("vllm-server", url, command, home, env, lambda: answers(f"{url}/health"))


def harness_command(
    python: str,
    url: str,
    settings: HarnessSettings,
    results: Path,
    include_path: Path | None = None,
    num_concurrent: int = 32,
) -> list[str]:
    """The command line of lm_eval against a server."""
    kind = "chat-completions" if settings.is_chat else "completions"
    arguments = {
        "model": MODEL,
        "base_url": f"{url}/v1/{kind.replace('-', '/')}",
        "num_concurrent": num_concurrent,
        "max_retries": 3,
        "tokenized_requests": False,
        # A chat is sent as it is; log-likelihoods of bare text need to know where its tokens end.
        "tokenizer_backend": "None" if settings.is_chat else "remote",
    }
    if settings.max_model_len is not None:
        arguments["max_length"] = settings.max_model_len
    command = [python, "-m", "lm_eval", "run", "--model", f"local-{kind}"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", ",".join(settings.tasks), "--output_path", str(results), "--log_samples"]
    command += ["--seed", str(settings.seed)]
    command += ["--apply_chat_template"] if settings.is_chat else []
    for option, value in (
        ("--num_fewshot", settings.num_fewshot),
        ("--limit", settings.limit),
        ("--include_path", include_path),
    ):
        command += [] if value is None else [option, str(value)]
    return command


def ask(command: Sequence[str], server: Service) -> None:
    """Run the harness, whose words go to the terminal; raises RuntimeError with the end of the server's log."""
    done = subprocess.run(command, env=child_environment({}), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    if done.returncode:
        raise RuntimeError(
            f"lm_eval exited with status {done.returncode}, its last words are above; the server's are:\n"
            f"{server.log_tail()}"
        )


def metrics(results: dict[str, Any]) -> dict[str, float | int]:
    """Numbers by `lm_eval/{task}/{metric}`, a filter behind a dot: lm_eval/gsm8k/exact_match.strict-match."""
    found: dict[str, float | int] = {}
    for task, numbers in results["results"].items():
        for name, value in numbers.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                metric = name.removesuffix(",none").replace(",", ".")
                found[f"lm_eval/{task}/{metric}"] = value
    return found


def collected(results: Path, committed: Path) -> Path:
    """Its files under names that do not depend on the model's path or on the time: results.json, samples_*.jsonl."""
    committed.mkdir()
    files = [path for path in results.rglob("*") if path.is_file()]
    for path in files:
        name = re.sub(r"_\d{4}-\d\d-\d\dT[\d.:-]+(?=\.jsonl?$)", "", path.name)
        shutil.copyfile(path, committed / name)
    if not (committed / "results.json").exists():
        raise RuntimeError(f"lm_eval left no results.json, but {', '.join(path.name for path in files) or 'nothing'}")
    return committed


def _version(python: str, package: str) -> str | None:
    try:
        done = subprocess.run([python, "-c", _VERSIONS.format(package)], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"--python is {python}, which cannot be run: {error}") from error
    return done.stdout.strip() if done.returncode == 0 else None


def _sha256_of(directory: Path) -> str:
    if not directory.is_dir():
        raise ValueError(f"--include-path is {directory}, which is no directory")
    files = sorted(path for path in directory.rglob("*") if path.suffix in (".yaml", ".yml", ".py", ".jsonl", ".json"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(os.fsencode(path.relative_to(directory)) + b"\0" + path.read_bytes())
    return digest.hexdigest()
