"""Stage `quantize`: a policy and sequences -> the policy with quantized Linear layers, and what that costs it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forge_core.artifacts import Manifest
from forge_core.chat import encode_turns, load_tokenizer
from forge_core.examples import read_examples
from forge_core.jobs import QuantizeJob
from forge_core.quantization import calibration
from forge_core.quantization.errors import LayerError, OutputError, measure_errors
from forge_core.quantization.export import export_policy
from forge_core.quantization.layers import linear_layers
from forge_core.quantization.observers import observed_range
from forge_core.quantization.post_training import QuantizedModel, quantize_model
from forge_core.quantization.report import LayerRow, as_markdown, plot
from forge_core.quantization.schemes import ActivationScale, integer_parameters
from forge_core.quantize_config import CalibrationConfig
from forge_core.rollouts import Rollouts
from forge_core.stages.workspace import Stopwatch, Workspace

# In a folder of its own: engines load every safetensors file that lies beside config.json.
STATISTICS = "calibration/statistics.safetensors"


def run(job: QuantizeJob, workspace: Workspace) -> Manifest:
    """Calibrate, quantize, measure on held-out sequences, export."""
    transformers_logging.disable_progress_bar()
    watch, settings = Stopwatch(), job.quantize.calibration
    with watch("load"):
        _, hf_dir = workspace.fetch(job.policy)
        model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype="auto", trust_remote_code=False).eval()
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        pool, heldout = split(_sequences(job, workspace, hf_dir), settings.num_heldout, job.seed)
    with watch("quantize"):
        quantized = quantize_model(model, pool, job.quantize, seed=job.seed, dtype=model.dtype, max_mae=job.max_mae)
    with watch("measure"):
        errors, output = measure_errors(model, quantized.layers, heldout, settings.batch_size)
    workspace.injection.reach("work")
    with workspace.directory() as directory:
        names = list(linear_layers(model))
        export_policy(hf_dir, directory, model=model, layers=quantized.layers, linear_names=names)
        statistics = statistics_of(quantized, settings)
        (directory / STATISTICS).parent.mkdir()
        save_file(statistics, directory / STATISTICS)
        drifts = _drifts(job, workspace, statistics)
        summary = describe(quantized, output, errors, drifts) | sizes(hf_dir, directory)
        rows = [row_of(name, quantized, errors, drifts) for name in quantized.seen]
        (directory / "layers.json").write_text(json.dumps([row.model_dump() for row in rows], indent=1) + "\n")
        (directory / "report.md").write_text(as_markdown(rows, summary, job.quantize))
        plot(rows, directory / "layers.png")
        return workspace.commit(job, directory, summary=summary, timings=watch.seconds)


def _sequences(job: QuantizeJob, workspace: Workspace, hf_dir: Path) -> list[tuple[str, Tensor]]:
    """All sequences to calibrate on, each with the id of its problem."""
    if job.dataset is not None:
        _, directory = workspace.fetch(job.dataset)
        tokenizer = load_tokenizer(hf_dir)
        examples = read_examples(directory / "examples.jsonl")
        return [
            (one.id, torch.tensor(ids))
            for one in examples
            for ids, _ in encode_turns(tokenizer, one.conversation, job.chat)
        ]
    found = []
    for ref in job.rollouts:
        _, directory = workspace.fetch(ref)
        rollouts = Rollouts.load(directory)
        found += [(text.example.id, rollouts.sequence(place).token_ids) for place, text in enumerate(rollouts.texts)]
    return found


def split(sequences: list[tuple[str, Tensor]], num_heldout: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences to calibrate on, and those held out: of other problems, at least `num_heldout`, whole problems.

    Raises ValueError when nothing is left to calibrate on.
    """
    problems = sorted({problem for problem, _ in sequences})
    random.Random(seed).shuffle(problems)
    by_problem: dict[str, list[Tensor]] = {problem: [] for problem in problems}
    for problem, sequence in sequences:
        by_problem[problem].append(sequence)
    heldout: list[Tensor] = []
    while problems and len(heldout) < num_heldout:
        heldout += by_problem[problems.pop()]
    pool = [sequence for problem in problems for sequence in by_problem[problem]]
    if not pool:
        raise ValueError(
            f"calibration.num_heldout is {num_heldout}, which leaves none of {len(sequences)} sequences to calibrate "
            "on; give more rollouts, or lower it"
        )
    return pool, heldout


def statistics_of(quantized: QuantizedModel, settings: CalibrationConfig) -> dict[str, Tensor]:
    """Ranges, deviations, scales and zero points of every layer's input before the remedy, to compare calibrations by.

    The zero points are those of an asymmetric range, whatever the scheme: a symmetric one never moves.
    """
    tensors: dict[str, Tensor] = {}
    for name, seen in quantized.before.items():
        low, high = observed_range(seen, settings, symmetric=False)
        scale, zero_point = integer_parameters(torch.tensor(low), torch.tensor(high), bits=8, symmetric=False)
        numbers = {"low": seen.low, "high": seen.high, "std": seen.std, "scale": scale, "zero_point": zero_point}
        tensors |= {f"{name}.{key}": torch.as_tensor(value).clone() for key, value in numbers.items()}
        tensors[f"{name}.channel_absmax"] = seen.channel_absmax()
    return tensors


def _drifts(job: QuantizeJob, workspace: Workspace, statistics: dict[str, Tensor]) -> dict[str, float]:
    """Zero-point drift of every layer that the previous calibration has too."""
    if job.previous is None:
        return {}
    _, directory = workspace.fetch(job.previous)
    previous = load_file(directory / STATISTICS)
    names = [key.removesuffix(".scale") for key in statistics if key.endswith(".scale") and key in previous]
    return {name: calibration.drift(_scale(statistics, name), _scale(previous, name)) for name in names}


def _scale(tensors: dict[str, Tensor], name: str) -> ActivationScale:
    return ActivationScale(tensors[f"{name}.scale"].item(), int(tensors[f"{name}.zero_point"]))


def describe(
    quantized: QuantizedModel, output: OutputError, errors: dict[str, LayerError], drifts: dict[str, float]
) -> dict[str, float | int]:
    """What quantization costs, under its tracking names."""
    summary: dict[str, float | int] = {
        "quantize/mae": output.mae,
        "quantize/kl": output.kl,
        "quantize/sqnr_db": output.sqnr,
        "quantize/top1_agreement": output.top1_agreement,
        "quantize/layer_sqnr_db/min": min(error.sqnr for error in errors.values()),
        "quantize/layers": len(quantized.layers),
        "quantize/layers_kept": len(quantized.kept),
        "quantize/layers_flagged": len(quantized.flagged),
        "quantize/layers_remedied": len(quantized.remedied),
        "quantize/layers_still_flagged": len(quantized.still_flagged),
        "quantize/num_samples": quantized.num_samples,
        "quantize/range_sigmas/max": max(seen.span_sigmas for seen in quantized.before.values()),
    }
    if drifts:
        summary["quantize/zero_point_drift/max"] = max(drifts.values())
    return summary


def sizes(source: Path, out_dir: Path) -> dict[str, float | int]:
    """Bytes of the weights before and after, and how many times smaller they are."""
    before, after = (sum(file.stat().st_size for file in place.glob("*.safetensors")) for place in (source, out_dir))
    return {"quantize/num_bytes": after, "quantize/num_bytes_before": before, "quantize/size_ratio": before / after}


def row_of(name: str, quantized: QuantizedModel, errors: dict[str, LayerError], drifts: dict[str, float]) -> LayerRow:
    """One layer of the report."""
    error, seen = errors.get(name), quantized.before[name]
    return LayerRow(
        name=name,
        low=seen.low,
        high=seen.high,
        std=seen.std,
        span_sigmas=seen.span_sigmas,
        is_flagged=name in quantized.flagged,
        is_remedied=name in quantized.remedied,
        is_kept=name in quantized.kept,
        sqnr_db=error.sqnr if error else None,
        mae=error.mae if error else None,
        drift=drifts.get(name),
    )
