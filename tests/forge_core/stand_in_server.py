"""A server as the supervisor sees one, without an engine: python stand_in_server.py POLICY_DIR PORT NAME..."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from forge_core.stages.api_server import end_with_owner

_policy, _port, *_names = sys.argv[1:]
_state = {"status": 200}


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/fall-ill":
            _state["status"] = 503
        self.send_response(_state["status"] if self.path == "/health" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": name} for name in _names]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


end_with_owner()
if (Path(_policy) / "content").read_text().endswith("True"):
    sys.exit("tensor model.norm.weight has another shape")
ThreadingHTTPServer(("127.0.0.1", int(_port)), _Answers).serve_forever()
