"""The vLLM engine: prompts in, completions with their log-probs out.

Reproducible by construction: every completion is sampled with its own seed, so it does not depend on its neighbours in
the batch, on the order of the prompts or on what was generated before. Weights are swapped in place between versions.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import logging
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import JsonValue


def _prepare_environment() -> None:
    """Set what vLLM reads while it is imported; what the user has set in the environment stays."""
    on_gpu = torch.cuda.is_available()
    # On a CPU vLLM warns a dozen times about choices that are ours or that a CPU leaves no choice in.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if on_gpu else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    # The engine inside this process: no second process to start or to lose, and its scheduling is deterministic.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not on_gpu:
        # The default binds all threads to one core of a small machine.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # Splitting a sequence over threads, as the batch happens to need it, would change the last bits of log-probs.
        os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
        # torchao warns about each CUDA extension that a CPU build of torch cannot load, torch about torchao's enums.
        for name in ("torchao", "torch.utils._pytree", "vllm.triton_utils"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


_prepare_environment()

from vllm import LLM, EngineArgs, SamplingParams  # noqa: E402  (reads the environment prepared above)
from vllm.logprobs import Logprob  # noqa: E402
from vllm.outputs import CompletionOutput  # noqa: E402

from forge_core.config import GeneratorConfig, SamplingConfig  # noqa: E402
from forge_core.policy_layout import PolicyLayout  # noqa: E402
from forge_core.seeds import derive_seed  # noqa: E402

# Engine arguments that have a setting of ours, or that the algorithms rely on.
RESERVED_ENGINE_ARGS = {
    "model": "set policy.uri",
    "tokenizer": "set policy.uri",
    "seed": "set seed",
    "dtype": "set generator.dtype",
    "max_num_seqs": "set generator.max_num_seqs",
    "max_model_len": "set generator.max_model_len",
    "logprobs_mode": "it stays processed_logprobs: the loss needs log-probs at the sampling temperature",
}
LOWEST_TEMPERATURE = 0.01  # vLLM raises anything lower to this value, 0 apart
# On a CPU, policies of fewer parameters than this run on one thread: 512 completions of 16 tokens took 1.7 s on one
# thread and on two (1.6 M parameters), but 13 s on two while another process, such as the trainer, used a core.
SMALL_POLICY = 10_000_000
MAX_CPU_KV_CACHE = 2**30  # bytes; clearing a GiB takes seconds of the engine's start
CPU_BLOCK_TOKENS = 128  # vLLM's KV block on a CPU


@dataclass(frozen=True)
class Completion:
    """One sampled completion, exactly as the engine returned it.

    `token_ids` include the end-of-turn token that ended it, or the tokens of the stop string; `text` leaves both out.
    `logprobs` has one number per token: the log-prob under the distribution it was sampled from, temperature included.
    It is nan where the engine gave none, never a made-up number: the caller drops such a completion and counts it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    text: str


class Generator:
    """A vLLM engine that serves one policy at a time."""

    def __init__(self, hf_dir: Path, *, config: GeneratorConfig, seed: int) -> None:
        self._config = config
        self._served = PolicyLayout.read(hf_dir)
        self._llm: LLM | None = LLM(**engine_args(hf_dir, config, seed))

    def load_policy(self, hf_dir: Path) -> None:
        """Serve the weights in `hf_dir` from now on, in place; nothing computed with the old ones is used again.

        Raises ValueError before anything changes when a tensor is missing, unexpected or of another shape, or when the
        architecture differs: the old weights stay served.
        """
        layout = PolicyLayout.read(hf_dir)
        self._served.require_same(layout)
        llm = self._engine()
        self._llm = None  # until the swap is complete there is nothing that may be served
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(hf_dir)})
        if layout.config.get("tie_word_embeddings") and not torch.cuda.is_available():
            llm.apply_model(_tie_output_layer)
        if not llm.reset_prefix_cache():
            raise RuntimeError(f"vLLM kept its prefix cache after loading {hf_dir}; start a new generator")
        self._llm, self._served = llm, layout

    @property
    def is_reloadable(self) -> bool:
        """Whether `load_policy` works with what is served."""
        return self._served.is_reloadable

    def generate(
        self, prompts: list[list[int]], *, num_completions: int, sampling: SamplingConfig, seeds: list[int]
    ) -> list[list[Completion]]:
        """`num_completions` completions of every prompt; `seeds[i]` alone decides those of `prompts[i]`.

        Raises ValueError for a prompt that leaves no room for `sampling.max_tokens`.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts came with {len(seeds)} seeds; give one seed per prompt")
        _check_prompts(prompts, sampling.max_tokens, self._config.max_model_len)
        params = [_sampling_params(sampling, num_completions, seed) for seed in seeds]
        # Even in eager mode vLLM compiles one function of its sampler, which costs seconds and needs a C++ compiler.
        with torch.compiler.set_stance("default" if torch.cuda.is_available() else "force_eager"):
            outputs = self._engine().generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[_completion(output) for output in request.outputs] for request in outputs]

    def close(self) -> None:
        """Free the engine and its memory; a closed generator cannot be used again."""
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _engine(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the generator is closed, or a weight swap failed half-way; start a new generator")
        return self._llm


def engine_args(hf_dir: Path, config: GeneratorConfig, seed: int) -> dict[str, Any]:
    """Arguments of the engine, `config.overrides` checked and included."""
    layout = PolicyLayout.read(hf_dir)
    _check_overrides(config.overrides)
    on_gpu = torch.cuda.is_available()
    args = {
        "model": str(layout.hf_dir),
        "dtype": ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype,
        "seed": seed % 2**32,  # vLLM seeds NumPy with it; samples take their own seeds
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "use_tqdm_on_load": False,
    }
    return args | ({} if on_gpu else _cpu_engine_args(layout, config)) | config.overrides


def _check_overrides(overrides: Mapping[str, JsonValue]) -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in overrides:
        if name in RESERVED_ENGINE_ARGS:
            raise ValueError(f"generator.overrides sets {name}; {RESERVED_ENGINE_ARGS[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f"did you mean {' or '.join(close)}?" if close else "see vLLM's EngineArgs for the names"
            raise ValueError(f"generator.overrides sets {name}, which vLLM does not have; {hint}")


def _cpu_engine_args(layout: PolicyLayout, config: GeneratorConfig) -> dict[str, Any]:
    if layout.num_parameters < SMALL_POLICY and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    tokens = config.max_num_seqs * (config.max_model_len + CPU_BLOCK_TOKENS)
    return {
        # Nothing is compiled for a CPU: a small policy would spend minutes to gain nothing.
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        # No more is cleared than could be filled; without this vLLM takes most of the machine's memory.
        "kv_cache_memory_bytes": min(MAX_CPU_KV_CACHE, tokens * layout.kv_bytes_per_token),
        # A prompt split over two steps takes back a random number, which a CPU generator cannot do: prompts stay whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, config.max_model_len),
    }


def _tie_output_layer(model: Any) -> None:
    """Give the output layer the embeddings that were just loaded, since vLLM reloads only the latter.

    On a GPU the two are one tensor; on a CPU the output layer multiplies with a packed copy made at the start.
    """
    output_layer = model.lm_head.tie_weights(model.model.embed_tokens)
    output_layer.quant_method.process_weights_after_loading(output_layer)


def _check_prompts(prompts: Sequence[Sequence[int]], max_tokens: int, max_model_len: int) -> None:
    room = max_model_len - max_tokens
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; a policy needs at least one token to continue")
        if len(prompt) > room:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with sampling.max_tokens={max_tokens} and "
                f"generator.max_model_len={max_model_len} at most {room} fit: raise generator.max_model_len, lower "
                "sampling.max_tokens or drop the prompt"
            )


def _sampling_params(sampling: SamplingConfig, num_completions: int, seed: int) -> SamplingParams:
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature is {sampling.temperature}; vLLM samples at no less than {LOWEST_TEMPERATURE}, "
            "use 0 for greedy"
        )
    if sampling.temperature == 0 and num_completions > 1:
        raise ValueError(f"sampling.temperature is 0 with {num_completions} completions, all equal; ask for 1")
    return SamplingParams(
        n=num_completions,
        # vLLM gives sample i of a request the seed s + i: hashed, the ranges of neighbouring seeds do not overlap.
        seed=derive_seed("completions", seed),
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop),
        logprobs=0,  # of the sampled token alone
    )


def _completion(output: CompletionOutput) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with {output.finish_reason}; see its log")
    return Completion(
        token_ids=tuple(output.token_ids),
        logprobs=sampled_logprobs(output.token_ids, output.logprobs),
        finish_reason=output.finish_reason,
        text=output.text,
    )


def sampled_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob] | None] | None
) -> tuple[float, ...]:
    """The log-prob of each sampled token, nan where vLLM returned none."""
    rows = list(logprobs or [])
    rows += [None] * (len(token_ids) - len(rows))
    found = [row.get(token_id) if row else None for token_id, row in zip(token_ids, rows, strict=True)]
    return tuple(math.nan if entry is None or entry.logprob is None else float(entry.logprob) for entry in found)
