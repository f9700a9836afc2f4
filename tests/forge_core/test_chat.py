import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forge_core.chat import encode_conversation, encode_prompt, encode_turns
from forge_core.config import FreshPolicyConfig
from forge_core.data_config import ChatConfig
from forge_core.examples import Example, Message
from forge_core.policies import build_fresh_policy

PLAIN = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
BOS_FIRST = "{{ bos_token }}" + PLAIN
QUESTION = [{"role": "user", "content": "1+1="}]
TURN = [*QUESTION, {"role": "assistant", "content": "2"}]
TWO_TURNS = [
    {"role": "system", "content": "add"},
    *TURN,
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
]


def tiny_tokenizer(chat_template: str | None, *, adds_bos: bool = False, pad: str = "<p>") -> PreTrainedTokenizerFast:
    special = ["<s>", "<e>", "<p>"]
    characters = [chr(code) for code in (10, *range(32, 127))]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate([*special, *characters])}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<e>", pad_token=pad, chat_template=chat_template
    )


@pytest.fixture(scope="module")
def fresh_tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("fresh")
    build_fresh_policy(path, FreshPolicyConfig(hidden_size=32, num_layers=1, intermediate_size=32), 0)
    return AutoTokenizer.from_pretrained(path)


def learned_text(tokenizer, messages) -> str:
    ids, mask = encode_conversation(tokenizer, messages)
    return tokenizer.decode([token for token, is_learned in zip(ids, mask, strict=True) if is_learned])


def test_prompt_of_a_fresh_policy_ends_where_the_assistant_speaks(fresh_tokenizer):
    assert fresh_tokenizer.decode(encode_prompt(fresh_tokenizer, QUESTION)) == "<|user|>1+1=<|end|><|assistant|>"


def test_fresh_template_marks_each_answer_with_its_end_of_turn(fresh_tokenizer):
    assert learned_text(fresh_tokenizer, TWO_TURNS) == "2<|end|>4<|end|>"
    ids, _ = encode_conversation(fresh_tokenizer, TWO_TURNS)
    prompt = encode_prompt(fresh_tokenizer, TWO_TURNS[:-1])
    assert ids[: len(prompt)] == prompt
    assert fresh_tokenizer.decode(ids[len(prompt) :]) == "4<|end|>"


def test_prompt_ids_are_a_plain_list_of_integers(fresh_tokenizer):
    prompt = encode_prompt(fresh_tokenizer, QUESTION)
    assert type(prompt) is list
    assert {type(token) for token in prompt} == {int}


@pytest.mark.parametrize(
    ("template", "adds_bos", "num_bos"),
    [(BOS_FIRST, True, 1), (BOS_FIRST, False, 1), (PLAIN, True, 1), (PLAIN, False, 0)],
)
def test_bos_is_never_doubled(template, adds_bos, num_bos):
    tokenizer = tiny_tokenizer(template, adds_bos=adds_bos)
    assert encode_prompt(tokenizer, QUESTION).count(tokenizer.bos_token_id) == num_bos
    ids, mask = encode_conversation(tokenizer, TURN)
    assert ids.count(tokenizer.bos_token_id) == num_bos
    assert ids.index(tokenizer.eos_token_id) < mask.index(True)  # the user's turn comes first, unmarked


def test_end_of_turn_is_learned_when_pad_equals_eos():
    tokenizer = tiny_tokenizer(PLAIN, pad="<e>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert learned_text(tokenizer, TURN) == "2<e>"


def test_template_without_generation_blocks_is_marked_by_its_prefixes():
    # The newline that this template writes after <e> is never sampled, so it is not learned either.
    assert learned_text(tiny_tokenizer(PLAIN), TWO_TURNS) == "2<e>4<e>"


def test_end_of_turn_outside_the_generation_block_is_learned_too():
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}[a]{% generation %}{{ m['content'] }}"
        "{% endgeneration %}<e>{% else %}[u]{{ m['content'] }}<e>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    assert learned_text(tiny_tokenizer(template), TWO_TURNS) == "2<e>4<e>"


def test_generation_block_that_marks_nothing_is_an_error():
    template = (
        "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<e>{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(ValueError, match="no token of the conversation is the assistant's"):
        encode_conversation(tiny_tokenizer(template), TURN)


def test_conversation_without_an_assistant_turn_is_an_error():
    with pytest.raises(ValueError, match="no assistant turn"):
        encode_conversation(tiny_tokenizer(PLAIN), QUESTION)


def test_template_that_rewrites_earlier_turns_is_an_error():
    # Rendered with a prompt to follow, this template adds a hint that the finished conversation does not have.
    hint = PLAIN.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}think!")
    with pytest.raises(ValueError, match=r"first 1 messages .* not a prefix .* differ at token 9"):
        encode_conversation(tiny_tokenizer(hint), TURN)  # "[u]1+1=" is 7 tokens, <e> and the newline make 9


def test_tokenizer_without_a_template_names_the_remedy():
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        encode_prompt(tiny_tokenizer(None), QUESTION)


def test_character_outside_the_vocabulary_is_an_error(fresh_tokenizer):
    with pytest.raises(ValueError, match="cannot encode messages with roles"):
        encode_prompt(fresh_tokenizer, [{"role": "user", "content": "3 \N{MULTIPLICATION SIGN} 4"}])


def test_role_unknown_to_the_template_is_an_error(fresh_tokenizer):
    with pytest.raises(ValueError, match="role is tool"):
        encode_prompt(fresh_tokenizer, [{"role": "tool", "content": "3"}])


# Removes what the assistant thought from all turns but the last, as Qwen3's template does.
THINKING = (
    "{% for m in messages %}[{{ m['role'][0] }}]"
    "{% if m['role'] == 'assistant' %}"
    "{% if loop.last %}<think>{{ m['reasoning_content'] or '' }}</think>{% endif %}{{ m['content'] }}"
    "{% else %}{{ m['content'] }}{% endif %}<e>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% if enable_thinking is defined and enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}"
)
THOUGHTFUL = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2", "reasoning_content": "easy"},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4", "reasoning_content": "twice"},
]


@pytest.mark.parametrize("has_blocks", [False, True])
def test_turns_that_a_template_rewrites_are_learned_one_by_one(has_blocks):
    template = THINKING
    if has_blocks:
        start = "{% if m['role'] == 'assistant' %}"
        template = template.replace(start, start + "{% generation %}").replace(
            "{{ m['content'] }}{% else %}", "{{ m['content'] }}{% endgeneration %}{% else %}", 1
        )
    tokenizer = tiny_tokenizer(template)
    pieces = encode_turns(tokenizer, THOUGHTFUL)
    learned = [tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) for ids, mask in pieces]
    assert learned == ["<think>easy</think>2<e>", "<think>twice</think>4<e>"]
    for (ids, mask), turn in zip(pieces, (1, 3), strict=True):
        prompt = encode_prompt(tokenizer, THOUGHTFUL[:turn])
        assert ids[: len(prompt)] == prompt
        assert mask.index(True) == len(prompt)
    assert tokenizer.decode(pieces[1][0]).startswith("[u]1+1=<e>[a]2<e>")  # as the policy sees its own past


def test_conversation_that_only_grows_stays_one_sequence(fresh_tokenizer):
    assert encode_turns(fresh_tokenizer, TWO_TURNS) == [encode_conversation(fresh_tokenizer, TWO_TURNS)]


def test_template_variables_reach_prompts_and_conversations_alike():
    tokenizer, chat = tiny_tokenizer(THINKING), ChatConfig(template_kwargs={"enable_thinking": False})
    prompt = encode_prompt(tokenizer, THOUGHTFUL[:1], chat)
    assert tokenizer.decode(prompt) == "[u]1+1=<e>[a]<think></think>"
    assert tokenizer.decode(encode_prompt(tokenizer, THOUGHTFUL[:1])) == "[u]1+1=<e>[a]"
    ((ids, mask),) = encode_turns(tokenizer, TURN, chat)
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == "2<e>"


def test_tools_answer_without_being_learned():
    template = (
        "{% if tools %}{{ tools[0]['name'] }}{% endif %}{% for m in messages %}[{{ m['role'][0] }}]"
        "{% if m['tool_calls'] %}{{ m['tool_calls'][0]['name'] }}!{% endif %}{{ m['content'] }}<e>{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    example = Example(
        id="0",
        messages=(
            Message(role="system", content="use tools"),
            Message(role="user", content="1+1="),
            Message(role="assistant", content="", tool_calls=({"name": "add"},)),
            Message(role="tool", content="2", name="add"),
            Message(role="assistant", content="two"),
        ),
    )
    tokenizer, chat = tiny_tokenizer(template), ChatConfig(template_kwargs={"tools": [{"name": "add"}]})
    ((ids, mask),) = encode_turns(tokenizer, example.conversation, chat)
    assert tokenizer.decode(ids) == "add[s]use tools<e>[u]1+1=<e>[a]add!<e>[t]2<e>[a]two<e>"
    assert tokenizer.decode([i for i, on in zip(ids, mask, strict=True) if on]) == "add!<e>two<e>"


def test_messages_have_only_what_was_given():
    assert Message(role="user", content="hi").model_dump() == {"role": "user", "content": "hi"}
