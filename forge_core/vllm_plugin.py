"""What vLLM does first in each of its processes (entry point `vllm.general_plugins` of this package)."""

from __future__ import annotations

import torch


def spare_float32() -> None:
    """Have int8 layers of a float32 engine multiply with oneDNN.

    On a CPU with AMX vLLM 0.32 gives them a kernel that takes bfloat16 alone: float32 fails at the first token.
    """
    if torch.cuda.is_available():
        return
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    check = cpu.check_cpu_sgl_kernel
    if check.__module__ == __name__:  # vLLM may call its plugins more than once in a process
        return

    def is_usable(n: int, k: int, dtype: torch.dtype) -> bool:
        # While weights are loaded, torch's default is what the engine computes in.
        return torch.get_default_dtype() != torch.float32 and check(n, k, dtype)

    cpu.check_cpu_sgl_kernel = is_usable
