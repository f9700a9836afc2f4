"""A webhook as a chat service has one: it takes JSON by POST and remembers it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Webhook:
    """Its address, what it was told, and the status it answers with."""

    url: str = ""
    received: list[dict] = field(default_factory=list)
    status: int = 200


@contextmanager
def listening() -> Iterator[Webhook]:
    """A webhook on a free port of this machine."""
    hook = Webhook()

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        hook.url = f"http://127.0.0.1:{server.server_port}/hook/sesame"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hook
        server.shutdown()
