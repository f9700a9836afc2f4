"""Chat templates: messages in, token ids out. The only place that applies a template, so prompts agree everywhere.

Rollout prompts, SFT examples and evaluations all come through here; a prompt that a policy was trained on is therefore
exactly the prompt it is later sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

Message = Mapping[str, str]  # role and content
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def load_tokenizer(hf_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy."""
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of the messages, ready for the assistant to speak.

    They start with one BOS when the template renders one or the tokenizer adds one, and with none otherwise.
    """
    ids, _ = _render(tokenizer, messages, add_generation_prompt=True)
    return ids


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation, and True on what the assistant says, its end-of-turn tokens included.

    The mask comes from the template, never from comparing ids with the pad token, so a tokenizer with pad == eos still
    teaches the policy to stop. The ids begin with `encode_prompt` of the messages before the last assistant turn;
    raises ValueError when the template makes that impossible, or when there is nothing to learn.
    """
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise ValueError(f"conversation of {len(messages)} messages has no assistant turn: there is nothing to learn")
    ids, marked = _render(tokenizer, messages, add_generation_prompt=False)
    if GENERATION_BLOCK.search(_template(tokenizer)):
        mask = _with_end_of_turn(ids, marked, tokenizer.eos_token_id)
        _prefix_length(tokenizer, messages[: turns[-1]], ids, add_generation_prompt=True)
    else:
        mask = _mask_between_prefixes(tokenizer, messages, turns, ids)
    if not any(mask):
        raise ValueError("no token of the conversation is the assistant's; check {% generation %} in the chat template")
    return ids, mask


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> tuple[list[int], list[bool]]:
    """Ids of the rendered messages, and True inside the template's `{% generation %}` blocks (if it has any)."""
    template = _template(tokenizer)
    has_blocks = bool(GENERATION_BLOCK.search(template)) and not add_generation_prompt
    try:
        encoding = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=has_blocks,
        )
        assert isinstance(encoding, Mapping)
    except Exception as error:  # jinja and tokenizers raise plain Exceptions
        roles = [message.get("role") for message in messages]
        raise ValueError(f"cannot encode messages with roles {roles}: {error}") from error
    ids = list(encoding["input_ids"])
    mask = [bool(flag) for flag in encoding["assistant_masks"]] if has_blocks else [False] * len(ids)
    # Templates are encoded without special tokens; a tokenizer that adds BOS expects one all the same.
    if _adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        return [tokenizer.bos_token_id, *ids], [False, *mask]
    return ids, mask


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path} has no chat template; add a chat_template.jinja to the policy's "
            "directory, or start from an instruction-tuned policy"
        )
    return tokenizer.get_chat_template()


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _mask_between_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turns: list[int], ids: list[int]
) -> list[bool]:
    """True from the end of each assistant turn's prompt to the end of that turn."""
    mask = [False] * len(ids)
    for turn in turns:
        start = _prefix_length(tokenizer, messages[:turn], ids, add_generation_prompt=True)
        stop = _prefix_length(tokenizer, messages[: turn + 1], ids, add_generation_prompt=False)
        if tokenizer.eos_token_id in ids[start:stop]:
            # What a template writes after the end-of-turn token (often a newline) is never sampled, so not learned.
            stop -= ids[start:stop][::-1].index(tokenizer.eos_token_id)
        mask[start:stop] = [True] * (stop - start)
    return mask


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ids: list[int], *, add_generation_prompt: bool
) -> int:
    """Number of tokens of the rendered messages; raises ValueError unless `ids` begins with exactly those tokens."""
    prefix, _ = _render(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    if ids[: len(prefix)] != prefix:
        differs = next((i for i, pair in enumerate(zip(prefix, ids, strict=False)) if len(set(pair)) > 1), len(ids))
        raise ValueError(
            f"the chat template renders the first {len(messages)} messages (add_generation_prompt="
            f"{add_generation_prompt}) as {len(prefix)} tokens that are not a prefix of the conversation's {len(ids)}: "
            f"they differ at token {differs}; use a template that only appends, or split the conversation per turn"
        )
    return len(prefix)


def _with_end_of_turn(ids: list[int], mask: list[bool], eos_token_id: int | None) -> list[bool]:
    """The mask with the EOS that directly follows a marked span marked too; many templates leave it outside."""
    extended = list(mask)
    for index in range(1, len(ids)):
        if mask[index - 1] and ids[index - 1] != eos_token_id and ids[index] == eos_token_id:
            extended[index] = True
    return extended
