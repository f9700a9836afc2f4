"""A proxy in front of an S3 server that answers some requests as a failing store or network would."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

import pytest
from s3fs import S3FileSystem

_ERROR = (
    "<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the proxy</Message><RequestId>1</RequestId></Error>"
)
_HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")


@dataclass
class Trouble:
    """What happens to the next `times` requests that match.

    `kind`: answer with `status` and `code`; `reset` the connection before the server has seen the request, or
    `reset_after` it has; `delay` by `seconds`; `swallow` the request and report success; `truncate` its body to half
    and store that; `cut` the answer's body in half; `hang` until the proxy ends.
    """

    kind: str
    method: str = "PUT"
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 503
    code: str = "SlowDown"
    seconds: float = 0.0
    only_if: Callable[[dict[str, str]], bool] = field(default=lambda headers: True)

    def matches(self, method: str, path: str, headers: dict[str, str]) -> bool:
        if method != self.method or not re.search(self.path, path) or self.times == 0 or not self.only_if(headers):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class S3Proxy:
    """`with S3Proxy(server.url) as proxy:` listens at `proxy.url`."""

    def __init__(self, target: str) -> None:
        self.troubles: list[Trouble] = []
        self.seen: list[str] = []  # "PUT /bucket/key?query"
        self.struck, self.closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            upstream = urlsplit(target).netloc
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def add(self, kind: str, **settings) -> Trouble:
        """Plan a trouble."""
        self.troubles.append(Trouble(kind, **settings))
        return self.troubles[-1]

    def trouble(self, method: str, path: str, headers: dict[str, str]) -> Trouble | None:
        with self._lock:
            self.seen.append(f"{method} {path}")
            found = next((one for one in self.troubles if one.matches(method, path, headers)), None)
        if found:
            self.struck.set()
        return found

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def proxied(target: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy before `target` to which this process's S3 requests go; s3fs caches connections by arguments only."""
    with S3Proxy(target) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        S3FileSystem.clear_instance_cache()
        yield proxy
        S3FileSystem.clear_instance_cache()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    owner: S3Proxy

    def do(self) -> None:
        body = self._body()
        trouble = self.owner.trouble(self.command, self.path, dict(self.headers))
        kind = trouble.kind if trouble else "none"
        if trouble is not None and trouble.seconds:
            time.sleep(trouble.seconds)
        if trouble is not None and kind == "answer":
            self._answer(trouble.status, {"Content-Type": "application/xml"}, _ERROR.format(code=trouble.code).encode())
        elif kind == "swallow":
            self._answer(200, {"ETag": '"0"'}, b"")
        elif kind == "hang":
            self.owner.closing.wait()
            self._reset()
        elif kind == "reset":
            self._reset()
        else:
            status, headers, content = self._forward(body[: len(body) // 2] if kind == "truncate" else body)
            if kind == "reset_after":
                self._reset()
            else:
                self._answer(status, headers, content, is_cut=kind == "cut")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        headers = {name: value for name, value in headers.items() if name.lower() not in ("content-length", "expect")}
        connection.request(
            self.command, self.path, body=body or None, headers=headers | {"Content-Length": str(len(body))}
        )
        response = connection.getresponse()
        content = response.read()
        answered = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
        connection.close()
        return response.status, answered, content

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, is_cut: bool = False) -> None:
        self.send_response(status)
        if self.command != "HEAD":
            headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
        if is_cut:
            self._reset()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        return
