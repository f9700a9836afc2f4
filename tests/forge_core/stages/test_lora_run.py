"""Whole runs with adapters in place of weights: reproducible like any other, and served by vLLM either way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core import storage
from forge_core.config import TrainerConfig
from forge_core.faults import FaultPlan
from forge_core.operation import WarmthConfig
from tests.pipeline import events, run_pipeline, tiny_config, weights_sha256

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Greedy answers of the merged policy, and of the policy it started from with the adapter beside it.
SERVE = """
import gc, json, sys
import forge_core.generator  # prepares the environment of vLLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

start, merged = sys.argv[1:]
prompts = [{"prompt_token_ids": [1, *ids, 4, 2]} for ids in json.loads(sys.stdin.read())]
greedy = SamplingParams(temperature=0, max_tokens=4)
options = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**26}
llm = LLM(model=start, enable_lora=True, max_lora_rank=8, **options)

def answers(adapter):
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, greedy, lora_request=adapter)]

plain, adapted = answers(None), answers(LoRARequest("trained", 1, f"{merged}/adapter"))
del llm  # when it goes it takes process groups with it, not those of the next one
gc.collect()
llm = LLM(model=merged, **options)
print(json.dumps([plain, adapted, answers(None)]))
"""


def test_run_with_adapters_is_reproducible_and_its_adapter_can_be_served(tmp_path: Path):
    trainer = TrainerConfig(row_tokens=256, lora={"rank": 8, "alpha": 32.0})
    grpo = tiny_config(str(tmp_path)).grpo
    changes = {"trainer": trainer, "grpo": grpo.model_copy(update={"num_iterations": 2, "checkpoint_every": 100})}
    warm = run_pipeline(tiny_config(str(tmp_path / "warm"), **changes), "run")
    cold = tiny_config(str(tmp_path / "cold"), keep_warm=WarmthConfig(trainer=False), fault_plan=FaultPlan(), **changes)
    assert weights_sha256(run_pipeline(cold, "run")) == weights_sha256(warm)
    assert len(set(weights_sha256(warm))) == 7  # start; weights and adapters of SFT and two updates
    assert [event["of"] for event in events(cold, "replay")] == ["update v0002"]  # from the adapters' beginning

    start, trained = (str(storage.local_path(manifest.files_uri)) for manifest in (warm[0], warm[1]))
    digits = range(ord("0") - 32 + 6, ord("9") - 32 + 7)  # ids of the character tokenizer: five special ones, newline
    prompts = json.dumps([[a, b] for a in digits for b in digits][:40])
    served = subprocess.run(
        [sys.executable, "-c", SERVE, start, trained], input=prompts, capture_output=True, text=True, check=False
    )
    assert served.returncode == 0, served.stderr[-3000:]
    plain, adapted, merged = json.loads(served.stdout.splitlines()[-1])
    assert adapted == merged
    assert adapted != plain
