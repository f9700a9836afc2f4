"""A policy rounded to fewer bits without calibration, for rollouts: what it needs is in the weights themselves."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forge_core.quantization.export import export_policy
from forge_core.quantization.layers import QuantizedLayer, linear_layers, quantizable
from forge_core.quantization.schemes import quantize_weight
from forge_core.quantize_config import QuantizeConfig, SchemeConfig


def round_policy(hf_dir: Path, out_dir: Path, scheme: SchemeConfig) -> None:
    """Write the policy in `hf_dir` to `out_dir` with every Linear layer but the output layer quantized.

    A pure function of the policy and the scheme, so nothing of it needs to be stored.
    """
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype="auto").eval()
    linears = linear_layers(model)
    with torch.no_grad():
        layers = {
            name: QuantizedLayer(scheme, quantize_weight(linears[name].weight, scheme, model.dtype), None)
            for name in quantizable(linears, QuantizeConfig(scheme=scheme).keep)
        }
        export_policy(hf_dir, out_dir, model=model, layers=layers, linear_names=list(linears))
