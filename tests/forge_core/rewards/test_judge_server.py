"""The judge against vLLM's own server: what it sends is understood there, and what comes back is counted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deployments.local_service import answers, free_port, start, wait_ready
from forge_core.config import FreshPolicyConfig
from forge_core.examples import Example, Message
from forge_core.policies import build_fresh_policy
from forge_core.rewards.judge import judge

EXAMPLE = Example(id="e", messages=(Message(role="user", content="1+1="),), answer="2")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.slow
def test_a_policy_behind_vllm_serve_is_asked_and_one_that_talks_nonsense_has_no_verdict(tmp_path: Path):
    policy, url = tmp_path / "policy", f"http://127.0.0.1:{(port := free_port())}"
    shape = FreshPolicyConfig(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32)
    build_fresh_policy(policy, shape, 0)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(policy),
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny"]
    with start("vllm", url, command, tmp_path, ENVIRONMENT, lambda: answers(f"{url}/health")) as server:
        wait_ready(server)
        settings: dict = {"base_url": f"{url}/v1", "template": "{question}{completion}", "cache": str(tmp_path / "x")}
        ask = ["2", "3", "2"], [EXAMPLE] * 3
        found = judge(*ask, model="tiny", max_tokens=8, **settings)
        assert found.values == [None] * 3
        assert (found.metrics["requests"], found.metrics["without_verdict"]) == (2, 3)
        # <|user|>, five characters and <|end|>, then <|assistant|>: 8 tokens.
        assert found.metrics["prompt_tokens"] == 2 * 8
        assert 1 <= found.metrics["completion_tokens"] <= 2 * 8
        assert judge(*ask, model="tiny", max_tokens=8, **settings).metrics["cached"] == 3
        with pytest.raises(ValueError, match=r"refuses the request \(HTTP 404"):
            judge(*ask, model="another", **settings)
