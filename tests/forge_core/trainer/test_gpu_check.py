"""The GPU check runs from end to end on a small model."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu_check


def test_the_smoke_run_reports_accuracy_and_speed(tmp_path):
    report = gpu_check.main(["--tiny", "--out", str(tmp_path / "report.json")])
    assert report == json.loads((tmp_path / "report.json").read_text())
    limit = 1e-4 if report["dtype"] == "float32" else 3 * report["accuracy"]["transformers_difference/max"]
    assert report["accuracy"]["logprob_difference/max"] < limit
    for loss in ("sft", "grpo"):
        assert report[loss]["tokens_per_second"] > 0
    # Random weights know nothing: the loss is about ln 512 = 6.24.
    assert report["sft"]["loss"] == pytest.approx(6.24, abs=0.3)


def test_operations_of_a_step_are_counted_by_hand():
    shape = {"vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 3}
    workload = gpu_check.Workload(row_tokens=8, num_rows=2, document_tokens=(4, 4), num_steps=1)
    batch = gpu_check.random_batch(shape, workload)
    # Three documents of 4 tokens, 2 trained each; 100 weights of which 40 are the output layer:
    # 6 * 60 * 12 + 6 * 40 * 6 + 6 * 2 * 2 * 3 * (3 * 16) = 4320 + 1440 + 3456
    assert gpu_check.step_flops(shape, 100, batch) == 9216
