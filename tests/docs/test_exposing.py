"""docs/exposing-the-server.md: nginx takes the page's proxy, and lets in the routes of the page alone."""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.markdown import ROOT, code_blocks
from tests.serving.server import free_port

PAGE = ROOT / "docs/exposing-the-server.md"


class Upstream(BaseHTTPRequestHandler):
    """Takes the server's place: answers with the Host header of the request."""

    def do_GET(self) -> None:
        body = self.headers["Host"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an nginx with the page's configuration, in front of a server that answers every request."""
    nginx, openssl = shutil.which("nginx"), shutil.which("openssl")
    if not (nginx and openssl):
        pytest.skip("nginx or openssl is not installed")
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "1"]
    files = ["-keyout", f"{folder}/privkey.pem", "-out", f"{folder}/fullchain.pem"]
    subprocess.run([openssl, *made, *files], check=True, capture_output=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (block,) = code_blocks(PAGE, "nginx")
        for old, new in {
            "/etc/nginx/tls": str(folder),
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "127.0.0.1:8085": f"127.0.0.1:{server.server_port}",
        }.items():
            assert old in block
            block = block.replace(old, new)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
        (folder / "nginx.conf").write_text(
            f"daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{places}{block}}}\n"
        )
        command = [nginx, "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
        checked = subprocess.run([*command, "-t"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 20
            while True:
                try:
                    ask(port, "GET", "/health")
                    break
                except OSError:
                    assert process.poll() is None, process.stderr.read()
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait(20)
            server.shutdown()


def ask(port: int, method: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=ssl._create_unverified_context())
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_proxy_lets_in_the_clients_routes_only(proxy: int) -> None:
    counts = ("responses/input_tokens", "messages/count_tokens")
    for route in ("chat/completions", "completions", "responses", "messages", *counts):
        assert ask(proxy, "POST", f"/v1/{route}")[0] == 200
    for path in ("/v1/models", "/v1/models/openai/gpt-oss-20b"):
        assert ask(proxy, "GET", path)[0] == 200
    for path in ("/invocations", "/tokenize", "/metrics", "/docs", "/v1/load_lora_adapter", "/v1/models/../../metrics"):
        assert ask(proxy, "POST", path)[0] == 404, path


def test_the_clients_host_header_does_not_reach_the_server(proxy: int) -> None:
    """CVE-2026-48746: the path was read from it."""
    assert ask(proxy, "GET", "/v1/models", Host="other.example") == (200, "gpt-oss")
    assert ask(proxy, "GET", "/v1/models", Host="a/x?")[0] == 400


def test_the_proxy_counts_requests(proxy: int) -> None:
    assert 429 in {ask(proxy, "GET", "/v1/models")[0] for _ in range(60)}
