"""A small OpenAI-compatible chat server for tests: what it says, and what goes wrong, is decided by a function."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer(ThreadingHTTPServer):
    """Answers each request with `say(prompt, earlier)`: a text, or (status, headers) for a failure.

    `earlier` counts the requests with the same prompt before this one. `prompts` and `keys` are what has arrived.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, say: Callable[[str, int], str | tuple[int, dict[str, str]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say = say
        self.prompts: list[str] = []
        self.keys: list[str | None] = []
        self.bodies: list[dict] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """What clients take for `base_url`."""
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with self.server.lock:
            earlier = self.server.prompts.count(prompt)
            self.server.prompts.append(prompt)
            self.server.keys.append(self.headers["Authorization"])
            self.server.bodies.append(body)
        said = self.server.say(prompt, earlier)
        if self.path != "/v1/chat/completions":
            said = (404, {})
        status, headers = (200, {}) if isinstance(said, str) else said
        choice = {"index": 0, "message": {"role": "assistant", "content": said}}
        choice["finish_reason"] = "length" if body.get("max_tokens") == 1 else "stop"
        reply = {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}
        content = json.dumps(reply if status == 200 else {"error": {"message": "by the test"}}).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve(say: Callable[[str, int], str | tuple[int, dict[str, str]]]) -> Iterator[ChatServer]:
    """A running server."""
    with ChatServer(say) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
