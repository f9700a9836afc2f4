"""Credentials in settings are refused early, and by errors that do not repeat them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import Flow
from prefect.utilities.schema_tools.validation import validate

from flows.branch import branch
from flows.drill import drill
from flows.post_train import post_train
from flows.serve import serve
from forge_core import storage
from forge_core.config import PostTrainConfig, load_config
from forge_core.credentials import CredentialsError, find_credentials, has_credentials
from forge_core.policy_uri import validate_policy_uri

URI = "s3://AKIAPLANTED:open/sesame@bucket/x"  # AWS makes secrets with slashes


@pytest.mark.parametrize("uri", [URI, "s3://k:s@b", "https://user:pass@host/x.jsonl", "gs://:s@b/x"])
def test_a_user_and_a_secret_are_seen(uri: str):
    assert has_credentials(uri)


@pytest.mark.parametrize(
    "text", ["s3://bucket/a:b@c", "http://host:8080/x@y", "hf://org/name@main", "a@b.c: x", "s3://bucket/x", ""]
)
def test_other_texts_are_left_alone(text: str):
    assert not has_credentials(text)


PLACES = [
    ("root", {"root": URI}),
    ("policy.uri", {"policy": {"uri": URI}}),
    ("reuse_from", {"reuse_from": URI}),
    ("grpo.dataset.kwargs.path", {"grpo": {"dataset": {"fn": "file", "kwargs": {"path": URI}}}}),
    ("evals.0.dataset.kwargs.path", {"evals": [{"dataset": {"fn": "file", "kwargs": {"path": URI}}}]}),
    ("rooot", {"rooot": URI}),  # a misspelt field, whose value pydantic would show
]


@pytest.mark.parametrize(("place", "settings"), PLACES, ids=[place for place, _ in PLACES])
def test_wherever_they_stand_the_field_is_named_and_not_the_value(place: str, settings: dict, tmp_path: Path):
    assert find_credentials(settings) == place
    (tmp_path / "mine.json").write_text(str(settings).replace("'", '"'))
    for refuse in (
        lambda: PostTrainConfig.model_validate(settings),
        lambda: load_config(tmp_path / "mine.json", PostTrainConfig),
        lambda: post_train.validate_parameters({"config": settings}),  # what Prefect does before a flow runs
        lambda: drill.validate_parameters({"config": {"run": settings}}),
    ):
        with pytest.raises(CredentialsError, match=r"holds credentials .*; put them in the environment") as caught:
            refuse()
        assert place in str(caught.value)
        assert "sesame" not in str(caught.value)


def test_a_storage_and_a_policy_refuse_them_too():
    with pytest.raises(ValueError, match="environment") as caught:
        storage.absolute_uri(URI)
    assert "sesame" not in str(caught.value)
    for uri in (URI, URI.replace("s3", "nosuchscheme")):
        with pytest.raises(ValueError, match=r"://\*\*\*@bucket/x, which holds credentials") as caught:
            validate_policy_uri(uri)
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("flow", "config"),
    [
        (post_train, {"root": URI}),
        (post_train, {"policy": {"uri": URI}}),
        (post_train, {"reuse_from": URI}),
        (serve, {"name": "x", "root": URI}),
        (branch, {"run": URI, "version": 0}),
    ],
)
def test_prefects_server_refuses_such_parameters_before_it_stores_them(flow: Flow, config: dict):
    [error] = validate({"config": config}, flow.parameters.model_dump_for_openapi())
    assert "a URI with credentials; put them in the environment" in error.message
