"""Chat templates: messages in, token ids out. The only place that applies a template, so prompts agree everywhere.

Rollout prompts, SFT examples and evaluations all come through here; a prompt that a policy was trained on is therefore
exactly the prompt it is later sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from forge_core.data_config import ChatConfig

Message = Mapping[str, JsonValue]  # role, content, and what else the template reads, such as tool_calls
AS_IS = ChatConfig()
GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RewrittenTurnsError(ValueError):
    """The chat template renders earlier turns in another way once the conversation goes on."""


def load_tokenizer(hf_dir: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a policy."""
    tokenizer = AutoTokenizer.from_pretrained(hf_dir, trust_remote_code=False)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat: ChatConfig = AS_IS
) -> list[int]:
    """Ids of the messages, ready for the assistant to speak.

    They start with one BOS when the template renders one or the tokenizer adds one, and with none otherwise.
    """
    ids, _ = _render(tokenizer, messages, chat, add_generation_prompt=True)
    return ids


def encode_whole(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat: ChatConfig = AS_IS
) -> list[int]:
    """Ids of a whole conversation, for a model that judges it."""
    ids, _ = _render(tokenizer, messages, chat, add_generation_prompt=False)
    return ids


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat: ChatConfig = AS_IS
) -> list[tuple[list[int], list[bool]]]:
    """Ids and masks that teach every assistant turn after exactly the prompt that it would be sampled from.

    One sequence for most templates. Where the template re-renders earlier turns (one that removes their thinking, for
    example), one sequence per assistant turn, each up to its turn and with that turn alone marked.
    """
    try:
        return [encode_conversation(tokenizer, messages, chat)]
    except RewrittenTurnsError:
        turns = _assistant_turns(messages)
        if len(turns) == 1:
            raise
    pieces = []
    for turn in turns:
        piece = messages[: turn + 1]
        ids, marked = _render(tokenizer, piece, chat, add_generation_prompt=False)
        mask = _learned(tokenizer, piece, chat, [turn], ids, marked)
        pieces.append((ids, mask))
    return pieces


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], chat: ChatConfig = AS_IS
) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation, and True on what the assistant says, its end-of-turn tokens included.

    The mask comes from the template, never from comparing ids with the pad token, so a tokenizer with pad == eos still
    teaches the policy to stop. The ids begin with `encode_prompt` of the messages before each assistant turn: raises
    RewrittenTurnsError when the template makes that impossible, ValueError when there is nothing to learn.
    """
    turns = _assistant_turns(messages)
    if not turns:
        raise ValueError(f"conversation of {len(messages)} messages has no assistant turn: there is nothing to learn")
    ids, marked = _render(tokenizer, messages, chat, add_generation_prompt=False)
    return ids, _learned(tokenizer, messages, chat, turns, ids, marked)


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def _learned(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat: ChatConfig,
    turns: list[int],
    ids: list[int],
    marked: list[bool],
) -> list[bool]:
    """True on what the assistant says in these turns: by the template's own marks, or else all of each turn."""
    within = _mask_between_prefixes(tokenizer, messages, chat, turns, ids)
    if GENERATION_BLOCK.search(_template(tokenizer)):
        of_template = _with_end_of_turn(ids, marked, tokenizer.eos_token_id)
        within = [a and b for a, b in zip(of_template, within, strict=True)]
    if not any(within):
        raise ValueError("no token of the conversation is the assistant's; check {% generation %} in the chat template")
    return within


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat: ChatConfig,
    *,
    add_generation_prompt: bool,
) -> tuple[list[int], list[bool]]:
    """Ids of the rendered messages, and True inside the template's `{% generation %}` blocks (if it has any)."""
    template = _template(tokenizer)
    has_blocks = bool(GENERATION_BLOCK.search(template)) and not add_generation_prompt
    options: dict[str, Any] = dict(chat.template_kwargs)
    turns: Any = [dict(message) for message in messages]
    try:
        encoding = tokenizer.apply_chat_template(
            turns,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=has_blocks,
            **options,
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
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat: ChatConfig,
    turns: list[int],
    ids: list[int],
) -> list[bool]:
    """True from the end of each assistant turn's prompt to the end of that turn."""
    mask = [False] * len(ids)
    for turn in turns:
        start = _prefix_length(tokenizer, messages[:turn], chat, ids, add_generation_prompt=True)
        stop = _prefix_length(tokenizer, messages[: turn + 1], chat, ids, add_generation_prompt=False)
        if tokenizer.eos_token_id in ids[start:stop]:
            # What a template writes after the end-of-turn token (often a newline) is never sampled, so not learned.
            stop -= ids[start:stop][::-1].index(tokenizer.eos_token_id)
        mask[start:stop] = [True] * (stop - start)
    return mask


def _prefix_length(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat: ChatConfig,
    ids: list[int],
    *,
    add_generation_prompt: bool,
) -> int:
    """Number of tokens of the rendered messages; raises RewrittenTurnsError unless `ids` begins with just those."""
    prefix, _ = _render(tokenizer, messages, chat, add_generation_prompt=add_generation_prompt)
    if ids[: len(prefix)] != prefix:
        differs = next((i for i, pair in enumerate(zip(prefix, ids, strict=False)) if len(set(pair)) > 1), len(ids))
        raise RewrittenTurnsError(
            f"the chat template renders the first {len(messages)} messages (add_generation_prompt="
            f"{add_generation_prompt}) as {len(prefix)} tokens that are not a prefix of the conversation's {len(ids)}: "
            f"they differ at token {differs}; use a template that only appends"
        )
    return len(prefix)


def _with_end_of_turn(ids: list[int], mask: list[bool], eos_token_id: int | None) -> list[bool]:
    """The mask with the EOS that directly follows a marked span marked too; many templates leave it outside."""
    extended = list(mask)
    for index in range(1, len(ids)):
        if mask[index - 1] and ids[index - 1] != eos_token_id and ids[index] == eos_token_id:
            extended[index] = True
    return extended
