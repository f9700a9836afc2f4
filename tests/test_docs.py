"""The code in docs/algorithms.md and docs/evaluation.md runs as it stands there, and their settings are settings."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge_core.advantages import AdvantageInputs, compute_advantages
from forge_core.config import PostTrainConfig
from forge_core.examples import Example, Message
from forge_core.functions import check_function, find_extractor, load_function
from forge_core.gates import GatesConfig
from forge_core.kl import k3
from forge_core.losses import LossInputs, LossOutput, simple_grpo
from forge_core.placement_config import PlacementConfig
from forge_core.settings import FunctionConfig
from tests.forge_core import golden
from tests.pipeline import tiny_config

DOCUMENT = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
EVALUATION = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text()
OLD, NEW, REF, _ = golden.logprobs()
INPUTS = LossInputs(
    logprobs=NEW,
    generator_logprobs=OLD,
    proximal_logprobs=OLD,
    advantages=golden.ADVANTAGES[:, None].expand(8, 5),
    mask=golden.MASK,
    sequence_ids=torch.arange(8)[:, None].expand(8, 5),
    reference_logprobs=REF,
)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The document's Python blocks as the modules that their first lines name."""
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCUMENT, re.DOTALL)
    assert [name for name, _ in blocks] == ["mine", "ported"]
    for name, code in blocks:
        (tmp_path / f"{name}.py").write_text(code)
    for name in ("mine", "ported", "my_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_reward_an_advantage_and_a_loss_of_ones_own():
    reward = FunctionConfig(fn="mine:ends_politely", kwargs={"word": "thanks"})
    check_function(reward, "reward")
    example = Example(id="x", messages=(Message(role="user", content="?"),))
    assert [load_function(reward, "reward")(text, example) for text in ("no thanks ", "thanks, no")] == [1, 0]

    inputs = AdvantageInputs(
        rewards=torch.tensor([[1.0], [2], [4], [0], [0], [3]]),
        weights=torch.ones(1),
        total=torch.tensor([1.0, 2, 4, 0, 0, 3]),
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        lengths=torch.ones(6),
    )
    for name, expected in (("above_median", [-1, 0, 2, 0, 0, 3]), ("best_of_batch", [0, 0, 1, 0, 0, 0])):
        advantage = FunctionConfig(fn=f"mine:{name}")
        check_function(advantage, "advantage")
        found, _ = compute_advantages(inputs, load_function(advantage, "advantage"), torch.ones(6, dtype=torch.bool))
        assert found.tolist() == expected

    loss = FunctionConfig(fn="mine:surrogate", kwargs={"scale": 0.5})
    check_function(loss, "loss")
    output: LossOutput = load_function(loss, "loss")(INPUTS)
    torch.testing.assert_close(output.per_token, -0.5 * (NEW - OLD).exp() * INPUTS.advantages)


def test_the_port_of_a_torchforge_loss_is_ours_with_its_kl_term():
    loss = FunctionConfig(fn="ported:simple_grpo_loss", kwargs={"beta": 0.2})
    check_function(loss, "loss")
    ported, ours = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    load_function(loss, "loss")(replace(INPUTS, logprobs=ported)).per_token[golden.MASK].sum().backward()
    per_token = simple_grpo(replace(INPUTS, logprobs=ours)).per_token + 0.2 * k3(ours, REF)
    per_token[golden.MASK].sum().backward()
    torch.testing.assert_close(ported.grad, ours.grad, atol=1e-6, rtol=1e-6)


def test_the_settings_in_the_document_are_settings():
    import yaml

    for block in re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL):
        settings = tiny_config("x").model_dump(mode="json")
        settings["grpo"] |= yaml.safe_load(block)["grpo"]
        PostTrainConfig.model_validate(settings)


def test_a_reward_of_the_evaluation_document_says_what_it_takes_for_the_answer(tmp_path: Path):
    [code] = re.findall(r"```python\n# my_rewards.py\n(.*?)```", EVALUATION, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(code)
    reward = FunctionConfig(fn="my_rewards:yes_or_no")
    extractor = find_extractor(reward)
    assert extractor == "my_rewards:yes_or_no_answer"
    example = Example(id="x", messages=(Message(role="user", content="?"),), answer="yes")
    texts = ("I say: Yes.", "No", "maybe")
    assert [load_function(reward, "reward")(text, example) for text in texts] == [1, 0, 0]
    extract = load_function(FunctionConfig(fn=extractor), "reward")
    assert [extract(text, example) for text in texts] == ["yes", "no", None]


def test_the_settings_in_the_evaluation_document_are_settings():
    import yaml

    [block] = re.findall(r"```yaml\n(.*?)```", EVALUATION, re.DOTALL)
    settings, shown = tiny_config("x").model_dump(mode="json"), yaml.safe_load(block)
    config = PostTrainConfig.model_validate(
        settings | {"evals": shown["evals"], "grpo": settings["grpo"] | shown["grpo"]}
    )
    assert (len(config.evals), config.grpo.evaluate_every) == (2, 10)
    for evaluation in config.evals:
        check_function(evaluation.dataset, "dataset")
        assert find_extractor(evaluation.reward)


def test_the_settings_in_the_operations_document_are_settings():
    import yaml

    text = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    gates, notify, placement = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    assert GatesConfig.model_validate(gates["gates"]).are_set
    assert PostTrainConfig.model_validate(notify).notify.url_env == "FORGE_WEBHOOK_URL"
    assert PlacementConfig.model_validate(placement["placement"]).pools["rollout"] == ("spot", "reserved")
