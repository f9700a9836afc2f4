"""Reward by a sequence classifier in Hugging Face layout: one number for a whole conversation.

Imports torch, so it runs in a worker of its own, which loads the model once.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import JsonValue
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from forge_core import artifacts
from forge_core.artifacts import read_manifest
from forge_core.chat import encode_whole, load_tokenizer
from forge_core.data_config import ChatConfig
from forge_core.examples import BatchRewards, Example
from forge_core.policy_uri import HF_URI
from forge_core.storage import absolute_uri

Device = Literal["auto", "cpu"]


def reward_model(
    completions: list[str],
    examples: list[Example],
    *,
    weights: str,
    batch_size: int = 16,
    max_tokens: int = 4096,
    device: Device = "auto",
    template_kwargs: dict[str, JsonValue] | None = None,
) -> BatchRewards:
    """The model's logit for each prompt with its completion; None for a conversation longer than `max_tokens`.

    `weights` is an artifact of the stage reward_model, a local directory or hf://org/name@revision: safetensors of a
    ...ForSequenceClassification with one label, and a tokenizer with a chat template. What it holds is part of the
    job's digest. `template_kwargs` are variables of the template, as they were in its training. Nothing is cut, and no
    code from the model's directory is run. Raises ValueError for a model that is not like this.
    """
    model, tokenizer = load(weights, device)
    conversations = [
        [*example.prompt, {"role": "assistant", "content": completion}]
        for completion, example in zip(completions, examples, strict=True)
    ]
    chat = ChatConfig(template_kwargs=template_kwargs or {})
    encoded = [tuple(encode_whole(tokenizer, turns, chat)) for turns in conversations]
    distinct = [ids for ids in dict.fromkeys(encoded) if len(ids) <= max_tokens]
    scores = dict(zip(distinct, score_sequences(model, distinct, batch_size), strict=True))
    metrics = {"too_long": sum(ids not in scores for ids in encoded), "tokens": sum(map(len, distinct))}
    return BatchRewards([scores.get(ids) for ids in encoded], metrics)


@torch.no_grad()
def score_sequences(model: PreTrainedModel, sequences: Sequence[Sequence[int]], batch_size: int) -> list[float]:
    """The logit of each sequence. They are taken in the order of their lengths, so the same ones give the same bits."""
    order = sorted(range(len(sequences)), key=lambda index: (len(sequences[index]), sequences[index]))
    found = [0.0] * len(sequences)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        logits = batch_logits(model, [sequences[index] for index in chosen])
        for index, value in zip(chosen, logits.tolist(), strict=True):
            found[index] = value
    return found


def batch_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits [B] of these sequences, padded on the right."""
    longest = max(map(len, sequences))
    pad, is_set = _pad_token(model, sequences)
    ids = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in sequences])  # [B, L]
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
    if not is_set:
        model.config.pad_token_id = pad
    try:
        logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits  # [B, 1]
    finally:
        if not is_set:
            model.config.pad_token_id = None
    return logits[:, 0].float()


def _pad_token(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> tuple[int, bool]:
    """The id to pad with, and whether it is the model's own.

    transformers reads a score at the last token that is no padding. A model without a pad token gets one that is in
    none of the sequences: with eos in its place, the end of the last turn would count as padding.
    """
    own = model.config.pad_token_id
    if own is not None:
        return own, True
    used = set().union(*sequences)
    return next(token for token in range(len(used) + 1) if token not in used), False


@functools.lru_cache(maxsize=1)
def load(weights: str, device: Device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready to score, and its tokenizer."""
    if hub := HF_URI.match(weights):
        import huggingface_hub

        return _load(Path(huggingface_hub.snapshot_download(hub["repo"], revision=hub["revision"])), weights, device)
    manifest = read_manifest(absolute_uri(weights))
    if manifest is None:
        return _load(Path(weights), weights, device)
    with tempfile.TemporaryDirectory() as scratch:  # its files stay mapped after they are gone
        _, directory = artifacts.fetch(manifest.ref, Path(scratch))
        return _load(directory, weights, device)


def _load(directory: Path, weights: str, device: Device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    is_on_gpu = device == "auto" and torch.cuda.is_available()
    model, info = AutoModelForSequenceClassification.from_pretrained(
        directory,
        dtype="auto" if is_on_gpu else torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if model.config.num_labels != 1 or info["missing_keys"]:
        raise ValueError(
            f"reward_model has the weights {weights}, a {type(model).__name__} with {model.config.num_labels} labels "
            f"that lacks {', '.join(sorted(info['missing_keys'])) or 'nothing'}; it must be a whole sequence "
            "classifier with one label (a causal LM has no head to score with)"
        )
    return model.eval().to("cuda" if is_on_gpu else "cpu"), load_tokenizer(directory)
