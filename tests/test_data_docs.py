"""docs/rewards.md and docs/data.md name everything that is built in, and their code runs as it stands there."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from forge_core.config import PostTrainConfig
from forge_core.datasets import Fields
from forge_core.examples import Example, Message
from forge_core.functions import BUILT_INS, check_function, is_over_batch, load_function
from forge_core.rewards.worker import call_over_batch
from forge_core.settings import FunctionConfig
from tests.pipeline import tiny_config

DOCS = {name: (Path(__file__).parent.parent / "docs" / f"{name}.md").read_text() for name in ("rewards", "data")}
EXAMPLE = Example(id="x", messages=(Message(role="user", content="?"),))


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The documents' Python blocks as the modules that their first lines name."""
    blocks = [re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.DOTALL) for text in DOCS.values()]
    for name, code in itertools.chain.from_iterable(blocks):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name, _ in itertools.chain.from_iterable(blocks):
        sys.modules.pop(name, None)


def test_everything_that_is_built_in_has_a_row():
    for role, document in (("reward", "rewards"), ("dataset", "data")):
        rows = set(re.findall(r"^\| `(\w+)` \|", DOCS[document], re.MULTILINE))
        assert rows == BUILT_INS[role].keys()


def test_a_reward_of_ones_own():
    polite, shortest = (FunctionConfig(fn=f"my_rewards:{name}") for name in ("polite", "shortest"))
    for reward in (polite, shortest):
        check_function(reward, "reward")
    assert [load_function(polite, "reward")(text, EXAMPLE) for text in ("please", "no", "")] == [1, 0, None]
    assert is_over_batch(shortest, "reward")
    found = call_over_batch(load_function(shortest, "reward"), "shortest", ["a", "bb", "c"], [EXAMPLE] * 3)
    assert (list(found.values), found.metrics) == ([1, 0, 1], {"characters": 1})


def test_a_dataset_of_ones_own():
    dataset = FunctionConfig(fn="my_data:squares", kwargs={"count": 11})
    check_function(dataset, "dataset")
    examples = list(load_function(dataset, "dataset")())
    assert (examples[10].answer, examples[10].metadata["difficulty"]) == ("100", 2)


@pytest.mark.parametrize("document", DOCS)
def test_the_settings_in_the_documents_are_settings(document: str):
    for block in re.findall(r"```yaml\n(.*?)```", DOCS[document], re.DOTALL):
        settings = tiny_config("x").model_dump(mode="json")
        given = yaml.safe_load(block)
        settings["grpo"] |= given.pop("grpo", {})
        config = PostTrainConfig.model_validate(settings | given)
        check_function(config.grpo.dataset, "dataset")
        for reward in config.grpo.rewards:
            check_function(reward, "reward")
        if "fields" in config.grpo.dataset.kwargs:
            Fields.model_validate(config.grpo.dataset.kwargs["fields"])
