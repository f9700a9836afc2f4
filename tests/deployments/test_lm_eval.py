"""lm-evaluation-harness: the command line it gets, what becomes of its results, and what is said when it is not there.

The package is not among the requirements, so no policy is served here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deployments.lm_eval import HarnessSettings, collected, evaluate, harness_command, installed_version, metrics
from forge_core.artifacts import Ref

RESULTS = {
    "results": {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.25,
            "exact_match_stderr,strict-match": 0.1,
            "exact_match,flexible-extract": 0.5,
        },
        "arc_easy": {"acc,none": 1, "acc_stderr,none": "N/A"},
    }
}


def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"has no package lm_eval.*pip install 'lm_eval\[api\]'.*--python"):
        installed_version(sys.executable)
    with pytest.raises(RuntimeError, match=r"--python is .*nowhere, which cannot be run"):
        installed_version(str(tmp_path / "nowhere"))


def test_only_policies_are_served():
    dataset = Ref(kind="dataset", uri="memory://run/datasets/x", digest="0" * 64)
    with pytest.raises(ValueError, match="is a dataset; only a policy can be served"):
        evaluate(dataset, HarnessSettings(tasks=("gsm8k",)))


def test_the_harness_asks_for_bare_completions(tmp_path: Path):
    settings = HarnessSettings(tasks=("gsm8k", "arc_easy"), num_fewshot=5, limit=100, max_model_len=2048, seed=3)
    command = harness_command("python", "http://127.0.0.1:1", settings, tmp_path, Path("mine"), num_concurrent=8)
    assert command == [
        *("python", "-m", "lm_eval", "run", "--model", "local-completions", "--model_args"),
        "model=policy,base_url=http://127.0.0.1:1/v1/completions,num_concurrent=8,max_retries=3,"
        "tokenized_requests=False,tokenizer_backend=remote,max_length=2048",
        *("--tasks", "gsm8k,arc_easy", "--output_path", str(tmp_path), "--log_samples", "--seed", "3"),
        *("--num_fewshot", "5", "--limit", "100", "--include_path", "mine"),
    ]


def test_or_through_the_chat_template(tmp_path: Path):
    command = harness_command("python", "http://x", HarnessSettings(tasks=("ifeval",), is_chat=True), tmp_path)
    assert command[4:8] == [
        "--model",
        "local-chat-completions",
        "--model_args",
        "model=policy,base_url=http://x/v1/chat/completions,num_concurrent=32,max_retries=3,tokenized_requests=False,"
        "tokenizer_backend=None",
    ]
    assert command[-1] == "--apply_chat_template"


def test_metrics_are_named_by_task_and_filter_and_none_is_the_path_of_another():
    found = metrics(RESULTS)
    assert found == {
        "lm_eval/gsm8k/exact_match.strict-match": 0.25,
        "lm_eval/gsm8k/exact_match_stderr.strict-match": 0.1,
        "lm_eval/gsm8k/exact_match.flexible-extract": 0.5,
        "lm_eval/arc_easy/acc": 1,
    }
    assert not [(one, other) for one in found for other in found if other.startswith(f"{one}/")]


def test_files_of_the_harness_get_names_without_the_time(tmp_path: Path):
    results = tmp_path / "results" / "__scratch__policy"
    results.mkdir(parents=True)
    (results / "results_2026-12-07T11-49-48.123456.json").write_text(json.dumps(RESULTS))
    (results / "samples_gsm8k_2026-12-07T11-49-48.123456.jsonl").write_text("{}\n")
    kept = collected(tmp_path / "results", tmp_path / "kept")
    assert sorted(path.name for path in kept.iterdir()) == ["results.json", "samples_gsm8k.jsonl"]
    with pytest.raises(RuntimeError, match=r"lm_eval left no results.json, but nothing"):
        collected(tmp_path / "nothing", tmp_path / "kept again")
