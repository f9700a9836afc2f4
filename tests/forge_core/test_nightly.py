"""Nights: what they start from, and when they have nothing to do."""

from __future__ import annotations

import uuid

import pytest

from forge_core import publication
from forge_core.artifacts import ArtifactError
from forge_core.config import PostTrainConfig
from forge_core.gc import find_garbage
from forge_core.manifests import find
from forge_core.nightly import from_champion, reason_to_skip, record
from forge_core.operation import RetentionConfig
from forge_core.plan import Plan
from forge_core.runs import write_run
from forge_core.storage import write_atomic
from tests.pipeline import tiny_config
from tests.stored_runs import store_run

DATA = {"grpo": "a"}


@pytest.fixture
def config() -> PostTrainConfig:
    return tiny_config(f"memory://{uuid.uuid4().hex}", name="night")


def test_the_first_night_starts_from_the_config_and_the_next_one_from_the_champion(config: PostTrainConfig):
    assert from_champion(config, "first") == config
    plan = store_run(config, "first")
    published = publication.publish(config.root, "night", find(plan.run_uri), run_id="first", metrics={})
    assert from_champion(config, "second").policy.uri == published.policy.uri
    # Once begun, a night stays with what it began with, although its own policy is the champion by now.
    write_run(plan.run_uri, "first", config)
    assert from_champion(config, "first") == config


def test_a_night_is_skipped_only_when_data_and_settings_are_those_of_the_last_one(config: PostTrainConfig):
    assert reason_to_skip(Plan(config, "first"), DATA) is None
    record(Plan(config, "first"), DATA)
    reason = "nothing new: first has learned from the same data with the same settings"
    assert reason_to_skip(Plan(config, "second"), DATA) == reason
    assert reason_to_skip(Plan(config, "first"), DATA) == reason  # a retry after the end
    assert reason_to_skip(Plan(config, "second"), {"grpo": "b"}) is None
    assert reason_to_skip(Plan(config.model_copy(update={"seed": 1}), "second"), DATA) is None
    # The champion is another one every night, and how files are kept is no reason to train.
    others = config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"uri": "hf://a/b"}),
            "retention": RetentionConfig(keep_last=3),
        }
    )
    assert reason_to_skip(Plan(others, "second"), DATA) == reason


def test_a_night_that_was_begun_is_finished(config: PostTrainConfig):
    record(Plan(config, "first"), DATA)
    second = Plan(config, "second")
    write_run(second.run_uri, "second", config)
    assert reason_to_skip(second, DATA) is None
    assert not [found for found in find_garbage(config.root) if "/published/" in found.uri]


def test_a_record_that_cannot_be_read_says_what_to_do(config: PostTrainConfig):
    write_atomic(f"{config.root}/published/night/nightly.json", b"{}")
    with pytest.raises(ArtifactError, match=r"nightly\.json is no record of a night; delete it to train once more"):
        reason_to_skip(Plan(config, "first"), DATA)
