"""A mirror of the Hugging Face hub: a directory of repositories behind the part of its HTTP API that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<id>[^/]+/[^/]+)(?:/(?P<what>[a-z-]+)/(?P<revision>[^/]+)(?:/.*)?)?"
)
_FILE = re.compile(r"(?P<kind>/datasets)?/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@contextmanager
def hub_mirror(root: Path) -> Iterator[str]:
    """Serve `{root}/models/{org}/{name}/` and `{root}/datasets/{org}/{name}/`; yields the address for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            is_json = "json" in self.headers.get("Content-Type", "")
            self._answer(with_body=True, paths=(json.loads(body) if is_json else parse_qs(body)).get("paths", []))

        def _answer(self, *, with_body: bool, paths: list[str] | None = None) -> None:
            place = unquote(urlsplit(self.path).path)
            if (found := _API.fullmatch(place)) and (repository := root / found["kind"] / found["id"]).is_dir():
                self._send(json.dumps(_describe(repository, found["id"], found["what"], paths)).encode(), with_body)
            elif (found := _FILE.fullmatch(place)) and (
                path := root / ("datasets" if found["kind"] else "models") / found["id"] / found["path"]
            ).is_file():
                self._send(path.read_bytes(), with_body)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in place else "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send(self, content: bytes, with_body: bool) -> None:
            etag, whole = hashlib.sha256(content).hexdigest(), len(content)
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            self.send_response(206 if span else 200)
            if span:
                first, last = int(span[1]), min(int(span[2] or whole - 1), whole - 1)
                content = content[first : last + 1]
                self.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _describe(repository: Path, name: str, what: str | None, paths: list[str] | None) -> object:
    files = sorted(path for path in repository.rglob("*") if path.is_file())
    names = {path.relative_to(repository).as_posix(): path for path in files}
    if what in ("tree", "paths-info"):
        wanted = names if paths is None else [path for path in paths if path in names]
        return [
            {
                "type": "file",
                "path": path,
                "size": names[path].stat().st_size,
                "oid": hashlib.sha1(names[path].read_bytes()).hexdigest(),
            }
            for path in wanted
        ]
    return {
        "id": name,
        "sha": COMMIT,
        "private": False,
        "gated": False,
        "disabled": False,
        "tags": [],
        "siblings": [{"rfilename": path} for path in names],
    }
