"""A chat endpoint that may be busy, slow or gone: requests with retries, and replies kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import secrets
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from forge_core.artifacts import canonical_json

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5  # doubled after each attempt
LONGEST_PAUSE_SECONDS = 60.0
RETRIED = (408, 409, 425, 429)  # and all from 500 on
SHOWN_CHARS = 300  # of a refusal


@dataclass(frozen=True)
class Reply:
    """What a model has said, and what it cost."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class ChatEndpoint:
    """`POST {base_url}/chat/completions` from many threads at once; a context manager that closes its connections."""

    def __init__(
        self, base_url: str, *, key: str | None, attempts: int, request_seconds: float, cache: str | None
    ) -> None:
        url = httpx.URL(f"{base_url.rstrip('/')}/chat/completions")
        if url.userinfo or url.scheme not in ("http", "https"):
            raise ValueError("judge needs a base_url of the form https://host/v1; name the key by api_key_variable")
        self._url, self._attempts = url, attempts
        self._cache = Path(cache) if cache is not None else None
        self._client = httpx.Client(
            timeout=request_seconds,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None),
        )
        self._lock = threading.Lock()
        self._last_failure = ""
        self.num_answered = self.num_failed = self.num_retries = self.prompt_tokens = self.completion_tokens = 0

    def __enter__(self) -> ChatEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, body: dict[str, Any]) -> Reply | None:
        """The reply to a request, from disk when it was asked before; None when no attempt brought one.

        Raises ValueError when the endpoint refuses the request: asking again would not help.
        """
        place = self._place(body)
        if place is not None and place.exists():
            with contextlib.suppress(ValueError, TypeError):  # one that was torn or edited is asked for again
                return Reply(**json.loads(place.read_text()))
        reply = self._ask(body)
        with self._lock:
            if reply is None:
                self.num_failed += 1
                return None
            self.num_answered += 1
            self.prompt_tokens += reply.prompt_tokens
            self.completion_tokens += reply.completion_tokens
        if place is not None:
            _keep(place, reply)
        return reply

    def require_an_answer(self) -> None:
        """Raise ConnectionError when requests were made and not one was answered: the endpoint is down."""
        if self.num_failed and not self.num_answered:
            raise ConnectionError(
                f"{self._url} answered none of {self.num_failed} requests in {self._attempts} attempts each; the last: "
                f"{self._last_failure}"
            )

    def _ask(self, body: dict[str, Any]) -> Reply | None:
        for attempt in range(self._attempts):
            wait: float | None = None
            try:
                answer = self._client.post(self._url, json=body)
                if answer.is_success:
                    return _reply(answer.json())
                failure = f"HTTP {answer.status_code}: {answer.text[:SHOWN_CHARS]}"
                if answer.status_code < 500 and answer.status_code not in RETRIED:
                    raise ValueError(f"{self._url} refuses the request ({failure}); check model, key and settings")
                with contextlib.suppress(ValueError):  # the header may also be a date
                    wait = float(answer.headers.get("retry-after", ""))
            except (httpx.TransportError, json.JSONDecodeError, LookupError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}"
            with self._lock:
                self._last_failure = failure
                self.num_retries += attempt + 1 < self._attempts
            if attempt + 1 < self._attempts:
                # Apart by chance, so that what failed together does not come back together.
                pause = FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1.5)
                time.sleep(min(LONGEST_PAUSE_SECONDS, pause if wait is None else max(0.0, wait)))
        logger.warning("%s gave no reply in %d attempts: %s", self._url, self._attempts, self._last_failure)
        return None

    def _place(self, body: dict[str, Any]) -> Path | None:
        if self._cache is None:
            return None
        digest = hashlib.sha256(canonical_json([str(self._url), body])).hexdigest()
        return self._cache / digest[:2] / f"{digest}.json"


def _reply(content: dict) -> Reply:
    choice, usage = content["choices"][0], content.get("usage") or {}
    return Reply(
        text=choice["message"].get("content") or "",
        finish_reason=str(choice.get("finish_reason")),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
    )


def _keep(place: Path, reply: Reply) -> None:
    """Write a reply so that other processes see all of it or nothing."""
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{secrets.token_hex(4)}")
    partial.write_text(json.dumps(asdict(reply)))
    os.replace(partial, place)
