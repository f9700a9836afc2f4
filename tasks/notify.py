"""Telling people what became of a run, by a webhook whose address is in the environment: it is a secret.

What is sent is `{"text": ..., "event": ..., "name": ..., "run_id": ..., ...}`; chat services show `text`.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Literal

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.flows import FlowStateHook
from prefect.logging.loggers import flow_run_logger
from pydantic import BaseModel

from forge_core.config import RunConfig
from forge_core.operation import NotifyConfig
from tasks.processes import Log

TIMEOUT_SECONDS = 10.0
MAX_REASON_CHARS = 1000
Event = Literal["published", "refused", "skipped"]
Details = dict[str, str | int]


def notify(config: RunConfig, run_id: str, event: Event, text: str, logger: Log, **details: str | int) -> None:
    """Tell what became of a run; nothing happens without a webhook, and a failure is only warned about."""
    about: Details = {"event": event, "name": config.name, "run_id": run_id}
    _send(config.notify, text, about | details, logger)


def on_bad_end(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """Hook of a flow: tell that a run has failed or crashed.

    After a crash it runs in the worker, which needs the environment variable as well.
    """
    config = flow_run.parameters.get("config")
    settings = config.model_dump(mode="json") if isinstance(config, BaseModel) else config
    if not isinstance(settings, Mapping) or not settings.get("notify"):
        return
    event = "crashed" if state.is_crashed() else "failed"
    about: Details = {
        "event": event,
        "name": str(settings.get("name", flow.name)),
        "run_id": str(flow_run.parameters.get("run_id") or f"run-{str(flow_run.id)[:8]}"),
        "flow_run_id": str(flow_run.id),
    }
    text = f"{flow.name} {flow_run.name} {event}: {(state.message or 'no reason given')[:MAX_REASON_CHARS]}"
    _send(NotifyConfig.model_validate(settings["notify"]), text, about, flow_run_logger(flow_run, flow))


BAD_END: list[FlowStateHook] = [on_bad_end]


def _send(settings: NotifyConfig, text: str, about: Details, logger: Log) -> None:
    if settings.url_env is None:
        return
    url = os.environ.get(settings.url_env, "")
    if not url.startswith(("http://", "https://")):
        logger.warning("nobody is told: %s, named by notify.url_env, holds no http(s) address", settings.url_env)
        return
    body = json.dumps({"text": text, **about}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Not the error's own words: they may repeat the address.
        status = f" {error.code}" if isinstance(error, urllib.error.HTTPError) else ""
        logger.warning("the webhook in %s was not told: %s%s", settings.url_env, type(error).__name__, status)
