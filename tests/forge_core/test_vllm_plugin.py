"""The plugin that vLLM finds and runs in its processes."""

from __future__ import annotations

from importlib.metadata import entry_points

import torch

import forge_core.generator  # noqa: F401  prepares the environment of vLLM


def test_vllm_finds_it_and_int8_layers_of_a_float32_engine_take_another_kernel(monkeypatch):
    [plugin] = entry_points(group="vllm.general_plugins", name="forge_flows")
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    asked = []
    monkeypatch.setattr(cpu, "check_cpu_sgl_kernel", lambda n, k, dtype: asked.append((n, k, dtype)) or True)
    for _ in range(2):  # the second time changes nothing
        plugin.load()()
    assert not cpu.check_cpu_sgl_kernel(16, 32, torch.int8)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert cpu.check_cpu_sgl_kernel(16, 32, torch.int8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert asked == [(16, 32, torch.int8)]
