"""Reward models: the score of a whole conversation, whatever shares its batch; and weights that count in the digest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification

from forge_core.chat import load_tokenizer
from forge_core.config import FreshPolicyConfig, FunctionConfig, RewardConfig
from forge_core.examples import Example, Message
from forge_core.functions import check_function, reward_sources, source_sha256
from forge_core.policies import build_fresh_policy
from forge_core.rewards import reward_model as module
from forge_core.rewards.pool import RewardPool
from forge_core.rewards.reward_model import reward_model

SHAPE = FreshPolicyConfig(hidden_size=32, num_layers=2, num_heads=1, num_kv_heads=1, intermediate_size=32)
EXAMPLE = Example(id="e", messages=(Message(role="user", content="1+1="),), answer="2")
COMPLETIONS = ["2", "it is two, I think", "", "2", "3"]


def build(directory: Path, *, seed: int = 0, num_labels: int = 1, pad: int | None = None) -> str:
    """A classifier of random weights with the tokenizer of a fresh policy."""
    build_fresh_policy(directory, SHAPE, seed)
    config = Qwen3ForCausalLM.from_pretrained(directory).config
    config.num_labels, config.pad_token_id = num_labels, pad
    torch.manual_seed(seed)
    Qwen3ForSequenceClassification(config).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("model"))


def scores(weights: str, completions: list[str], **settings) -> list[float | None]:
    return list(reward_model(completions, [EXAMPLE] * len(completions), weights=weights, **settings).values)


def test_the_score_is_read_at_the_end_of_the_last_turn_whatever_else_is_in_the_batch(weights):
    model = Qwen3ForSequenceClassification.from_pretrained(weights)
    tokenizer = load_tokenizer(Path(weights))
    expected = []
    for completion in COMPLETIONS:
        text = f"<|user|>1+1=<|end|><|assistant|>{completion}<|end|>"
        hidden = model.model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
        expected.append(model.score(hidden[0, -1]).item())
    assert len(set(expected)) == 4
    assert scores(weights, COMPLETIONS, batch_size=3) == pytest.approx(expected, abs=1e-5)
    assert scores(weights, COMPLETIONS, batch_size=1) == pytest.approx(expected, abs=1e-5)


def test_the_same_completions_have_the_same_scores_to_the_bit_in_any_order(weights):
    found = scores(weights, COMPLETIONS)
    assert scores(weights, COMPLETIONS[::-1]) == found[::-1]
    assert found[0] == found[3]


def test_a_conversation_that_is_too_long_has_no_score_and_is_counted(weights):
    # <|user|>1+1=<|end|><|assistant|> are 7 tokens, and the end of the turn is one.
    found = reward_model(["ab", "abc"], [EXAMPLE] * 2, weights=weights, max_tokens=10)
    assert found.values[0] is not None
    assert found.values[1] is None
    assert found.metrics == {"too_long": 1, "tokens": 10}


def test_what_is_no_reward_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="with 2 labels"):
        scores(build(tmp_path / "two", num_labels=2), ["2"])
    build_fresh_policy(tmp_path / "causal", SHAPE, 0)
    with pytest.raises(ValueError, match=r"that lacks score\.weight; it must be a whole sequence classifier"):
        scores(str(tmp_path / "causal"), ["2"])
    pickled = Path(build(tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        scores(str(pickled), ["2"])


def test_other_weights_in_the_same_place_make_another_job(tmp_path: Path):
    reward = FunctionConfig(fn="reward_model", kwargs={"weights": build(tmp_path / "model")})
    check_function(reward, "reward")
    first = source_sha256(reward, "reward")
    assert source_sha256(reward, "reward") == first
    other = FunctionConfig(fn="reward_model", kwargs={"weights": build(tmp_path / "copy")})
    assert source_sha256(other, "reward") == first  # what counts is what lies there
    build(tmp_path / "model", seed=1)
    assert source_sha256(reward, "reward") != first
    assert reward_sources([reward, other]) == {
        "reward_model": source_sha256(reward, "reward"),
        "reward_model_1": first,
    }


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("hf://org/name", "pin it as hf://org/name@revision"),
        ("/no/such/place", "no artifact, no local directory with a config.json"),
    ],
)
def test_weights_that_cannot_be_found_or_pinned_are_refused_while_the_config_is_checked(weights: str, message: str):
    with pytest.raises(ValueError, match=message):
        check_function(FunctionConfig(fn="reward_model", kwargs={"weights": weights}), "reward")


@pytest.mark.slow
def test_a_reward_model_and_a_verifier_score_side_by_side(weights):
    rewards = [RewardConfig(fn="reward_model", kwargs={"weights": weights}), RewardConfig(fn="exact_number")]
    pool = RewardPool(rewards, num_workers=1)
    scored = pool.score([(completion, EXAMPLE) for completion in COMPLETIONS])
    pool.close()
    assert [row[1] for row in scored.values] == [1, 0, 0, 1, 0]
    assert [row[0] for row in scored.values] == pytest.approx(scores(weights, COMPLETIONS), abs=1e-5)
    assert scored.metrics["reward_model/too_long"] == 0
    assert not math.isnan(scored.metrics["reward_model/tokens"])


def test_a_model_that_pads_with_its_end_of_turn_is_read_as_transformers_reads_it(tmp_path: Path):
    tokenizer_dir = build(tmp_path / "model")
    end = load_tokenizer(Path(tokenizer_dir)).eos_token_id
    weights = build(tmp_path / "model", pad=end)
    model, _ = module.load(weights, "cpu")
    assert model.config.pad_token_id == end
    alone = scores(weights, ["2"])
    assert scores(weights, COMPLETIONS)[0] == pytest.approx(alone[0], abs=1e-5)
