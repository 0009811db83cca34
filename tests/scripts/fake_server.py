"""A server that only tells what it serves, or answers something else than a list of models."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def fake_server(models: Mapping[str, str], status: int = 200, body: str | None = None) -> Iterator[str]:
    """Yields its URL. `models`: name -> checkpoint; `body` replaces the list."""
    listed = {"object": "list", "data": [{"id": name, "root": root} for name, root in models.items()]}
    text = (json.dumps(listed) if body is None else body).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

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
