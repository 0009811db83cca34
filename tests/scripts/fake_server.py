"""A server that lists its models and answers chats as a test wants, or sends something else than its models."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[str, str]  # the text, why it ended ("stop", "length")


@contextlib.contextmanager
def fake_server(
    models: Mapping[str, str],
    status: int = 200,
    body: str | None = None,
    reply: Callable[[dict[str, Any]], Reply] | None = None,
) -> Iterator[str]:
    """Yields its URL. `models`: name -> checkpoint; `body` replaces the list; `reply` answers a chat's request."""
    listed = {
        "object": "list",
        "data": [{"id": name, "root": root, "max_model_len": 16384} for name, root in models.items()],
    }
    text = (json.dumps(listed) if body is None else body).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(status if self.path == "/v1/models" else 404, text)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if reply is None or self.path != "/v1/chat/completions":
                self.send(404, b"{}")
                return
            words, ended = reply(asked)
            choice = {"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": ended}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            made = {"id": "chat", "object": "chat.completion", "created": 0, "model": asked["model"]}
            self.send(200, json.dumps({**made, "choices": [choice], "usage": usage}).encode())

        def send(self, code: int, content: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
