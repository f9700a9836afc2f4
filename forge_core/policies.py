"""Starting policies: every accepted source becomes one directory in Hugging Face layout, for vLLM and torchtitan."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from forge_core import storage
from forge_core.config import FreshPolicyConfig, PolicyConfig
from forge_core.policy_uri import FRESH_URI, HF_URI, policy_error, validate_policy_uri

POLICY_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.safetensors",
    "*.safetensors.index.json",
)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab*")
PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TRAINABLE_DTYPES = ("F32", "BF16", "F16")

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
SPECIAL_TOKENS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- elif message['role'] in ('user', 'system') -%}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- else -%}
{{- raise_exception("role is " + message['role'] + "; this template knows system, user and assistant") -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def import_policy(config: PolicyConfig, out_dir: Path, *, seed: int, scratch: Path) -> None:
    """Fill `out_dir` with the policy that `config.uri` names: configuration, tokenizer and safetensors, nothing else.

    `seed` decides the weights of a fresh policy; `scratch` receives downloads that are converted. Raises ValueError for
    anything that could not be trained and sampled later.
    """
    validate_policy_uri(config.uri)
    # Progress bars are for terminals; the output of a stage is a log.
    transformers_logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    out_dir.mkdir(parents=True, exist_ok=True)
    hub = HF_URI.match(config.uri)
    if config.uri == FRESH_URI:
        build_fresh_policy(out_dir, config.fresh, seed)
    elif hub:
        _copy_policy_files(config.uri, _download_from_hub(config.uri, hub["repo"], hub["revision"]), out_dir)
    elif config.uri.endswith(".gguf"):
        _convert_gguf(config.uri, out_dir, scratch)
    else:
        _copy_policy_files(config.uri, config.uri, out_dir)
    _check_weights(config.uri, out_dir)
    _check_tokenizer(config.uri, out_dir)


def build_fresh_policy(out_dir: Path, shape: FreshPolicyConfig, seed: int) -> None:
    """Write a randomly initialised float32 Qwen3 and its character tokenizer; the same seed gives the same bytes."""
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"policy.fresh.num_heads is {shape.num_heads}, not a multiple of num_kv_heads ({shape.num_kv_heads}); "
            "every key/value head serves the same number of query heads"
        )
    if shape.head_dim % 32:
        raise ValueError(
            f"policy.fresh.head_dim is {shape.head_dim}; vLLM's CPU attention needs a multiple of 32, use 32 or 64"
        )
    tokenizer = _character_tokenizer(shape.max_position_embeddings)
    token_ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        dtype=torch.float32,
        **token_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**token_ids)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def _character_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; any other character is an error rather than a silent substitute."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|end|>", "<|pad|>")],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
    )


def _download_from_hub(uri: str, repo: str, revision: str | None) -> str:
    """Local path of a hub snapshot; HF_HUB_OFFLINE=1 serves it from the cache alone."""
    try:
        return huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=list(POLICY_FILES), ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:  # huggingface_hub derives its errors from these
        raise policy_error(
            uri, f"could not be downloaded ({error})", "check the name, the network, HF_TOKEN and HF_HUB_OFFLINE"
        ) from error


def _copy_policy_files(uri: str, source: str, out_dir: Path) -> None:
    """Copy what a policy needs from a directory on any file system; optimizer states and pickles stay behind."""
    names = storage.list_names(source)
    if not _matching(names, ("*.safetensors",)):
        pickled = _matching(names, PICKLED_WEIGHTS)
        problem = f"has only pickled weights ({pickled[0]})" if pickled else "has no *.safetensors file"
        raise policy_error(uri, problem, "convert it with save_pretrained, which writes safetensors")
    for name in _matching(names, POLICY_FILES):
        storage.download(f"{source}/{name}", out_dir / name)


def _matching(names: list[str], patterns: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def _convert_gguf(uri: str, out_dir: Path, scratch: Path) -> None:
    """Write the dequantised weights and the tokenizer of a .gguf file; float32, as llama.cpp formats do not train."""
    storage.download(uri, scratch / "policy.gguf")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file="policy.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file="policy.gguf")
    except Exception as error:  # the gguf reader raises whatever its parser meets
        raise policy_error(uri, f"transformers cannot read ({error})", "use a safetensors directory") from error
    # The weights are plain by now; vLLM would take the remaining mention for a quantized policy.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    assert tokenizer is not None
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def read_tensor_headers(hf_dir: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Safetensors dtype and shape of every tensor in a directory, without reading the numbers.

    With an index only the shards it lists count, as for vLLM and transformers. Raises ValueError when a file is broken
    or the index and the files disagree.
    """
    index_path = hf_dir / "model.safetensors.index.json"
    weight_map = json.loads(index_path.read_text())["weight_map"] if index_path.exists() else None
    names = sorted(set(weight_map.values()) if weight_map else {path.name for path in hf_dir.glob("*.safetensors")})
    headers = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index_path} names {name}, which is no file beside it; copy the directory again")
        try:
            with safe_open(hf_dir / name, framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118  (not a mapping)
                    tensor = shard.get_slice(key)
                    headers[key] = (tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{hf_dir / name} is not a readable safetensors file ({error}); copy it again") from error
    missing = sorted(set(weight_map or ()) - set(headers))
    if missing:
        raise ValueError(f"{index_path} lists {missing[0]}, which no shard holds; copy the directory again")
    return headers


def _check_weights(uri: str, out_dir: Path) -> None:
    config = json.loads((out_dir / "config.json").read_text())
    if "quantization_config" in config:
        raise policy_error(uri, "is quantized and cannot be trained", "start from the unquantized policy")
    try:
        AutoConfig.from_pretrained(out_dir, trust_remote_code=False)
        headers = read_tensor_headers(out_dir)
    except (KeyError, ValueError) as error:
        raise policy_error(uri, f"cannot be loaded ({error})", "give a complete Hugging Face directory") from error
    for name, (dtype, _) in headers.items():
        if dtype not in TRAINABLE_DTYPES:
            remedy = f"convert it to one of {', '.join(TRAINABLE_DTYPES)} with save_pretrained"
            raise policy_error(uri, f"holds {name} as {dtype}", remedy)


def _check_tokenizer(uri: str, out_dir: Path) -> None:
    # Without a vocabulary transformers 5 returns an empty tokenizer rather than an error.
    if not _matching([path.name for path in out_dir.iterdir()], VOCABULARY_FILES):
        raise policy_error(uri, "has no tokenizer", "add its tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(out_dir, trust_remote_code=False)
    except Exception as error:  # transformers raises ValueError, OSError, KeyError or TypeError, by tokenizer class
        raise policy_error(uri, f"has no usable tokenizer ({error})", "add its tokenizer.json") from error
    assert tokenizer is not None
    if not tokenizer.chat_template:
        raise policy_error(
            uri, "has no chat template", "add chat_template.jinja, or start from an instruction-tuned policy"
        )
    if tokenizer.eos_token_id is None:
        raise policy_error(uri, "has no eos token, so completions never end", "set eos_token in tokenizer_config.json")
