"""Who hears of a run, and that nobody's deafness ends one."""

from __future__ import annotations

import logging
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed, Failed

from deployments.local_service import free_port
from flows.post_train import post_train
from forge_core.config import PostTrainConfig
from forge_core.credentials import CredentialsError
from forge_core.operation import NotifyConfig
from tasks.notify import notify, on_bad_end
from tests.webhook import Webhook

LOGGER = logging.getLogger("notify")
CONFIG = PostTrainConfig(name="mine", notify=NotifyConfig(url_env="MY_WEBHOOK"))


def flow_run(**parameters: object) -> FlowRun:
    return FlowRun(id=UUID(int=7), flow_id=UUID(int=1), name="mine-seed0", parameters=parameters)


def test_a_webhook_is_told_in_words_and_in_fields(webhook: Webhook, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_WEBHOOK", webhook.url)
    notify(CONFIG, "run", "published", "mine: version 3 published by run", LOGGER, version=3)
    assert webhook.received == [
        {
            "text": "mine: version 3 published by run", "event": "published", "name": "mine", "run_id": "run",
            "version": 3,
        }
    ]  # fmt: skip


@pytest.mark.parametrize(("state", "event"), [(Failed(message="no disk"), "failed"), (Crashed(), "crashed")])
@pytest.mark.parametrize("config", [CONFIG, CONFIG.model_dump(mode="json")], ids=["called", "deployed"])
def test_a_bad_end_is_told_with_its_reason(webhook: Webhook, monkeypatch: pytest.MonkeyPatch, state, event, config):
    monkeypatch.setenv("MY_WEBHOOK", webhook.url)
    on_bad_end(post_train, flow_run(config=config), state)
    [told] = webhook.received
    assert told == {
        "text": f"post-train mine-seed0 {event}: {'no disk' if event == 'failed' else 'no reason given'}",
        "event": event, "name": "mine", "run_id": "run-00000000", "flow_run_id": str(UUID(int=7)),
    }  # fmt: skip


def test_without_a_webhook_nobody_is_told(webhook: Webhook):
    notify(PostTrainConfig(), "run", "published", "x", LOGGER)
    for parameters in ({}, {"config": {"name": "mine"}}, {"config": "damaged"}, {"config": PostTrainConfig()}):
        on_bad_end(post_train, flow_run(**parameters), Failed())
    assert webhook.received == []


@pytest.mark.parametrize("trouble", ["refuses", "is away", "is unset", "is no address"])
def test_a_webhook_that_does_not_work_is_warned_about_without_its_address(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
):
    webhook.status = 500
    url = {"refuses": webhook.url, "is away": f"http://127.0.0.1:{free_port()}/sesame", "is no address": "ftp://sesame"}
    if trouble in url:
        monkeypatch.setenv("MY_WEBHOOK", url[trouble])
    notify(CONFIG, "run", "published", "x", LOGGER)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "MY_WEBHOOK" in record.getMessage()
    assert "sesame" not in caplog.text


def test_the_name_of_a_variable_is_asked_for_and_not_the_address():
    with pytest.raises(CredentialsError, match="put it in the environment, and the variable's name here") as caught:
        PostTrainConfig.model_validate({"notify": {"url_env": "https://hooks.example.org/sesame"}})
    assert "sesame" not in str(caught.value)
