"""Codex, Claude Code and OpenCode themselves against each release of vLLM: `make test-clients`.

The model is a script (script.py); all else is real: the agent runs the call, sends the result, and shows the answer.
Each request is counted, since an agent hides a refused field by asking again without it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.agents import cli, script
from tests.clients.agents.conftest import CONTEXT, Asked
from tests.serving.openai.conftest import NAME, Server

pytestmark = [pytest.mark.clients, pytest.mark.slow]

CHAT, RESPONSES, MESSAGES = (f"POST /v1/{path} 200" for path in ("chat/completions", "responses", "messages"))
REFUSED = "POST /v1/messages 400"


class Outside:
    """A proxy that lets nothing through. `tried` has the first line of each request to another host."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._socket.accept()[0] as client:
                    self.tried.append(client.recv(4096).decode(errors="replace").partition("\r\n")[0])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def outside() -> Iterator[Outside]:
    proxy = Outside()
    yield proxy
    proxy.close()
    assert proxy.tried == []


@pytest.fixture
def ask(
    server: Server, tmp_path: Path, modules: Path, outside: Outside, record_property: Callable[[str, object], None]
) -> Callable[..., str]:
    """Run a turn of an agent, made by one of cli's functions, in its folder; returns its output."""
    (folder := tmp_path / "work").mkdir()
    agents: dict[object, cli.Agent] = {}

    def asked(made: Callable[..., cli.Agent], prompt: str, *, resume: bool = False, **options: object) -> str:
        if made not in agents:
            record_property("client", made.__name__)
            (home := tmp_path / "home").mkdir()
            agents[made] = made(cli.Served(server.url, NAME, CONTEXT), home, modules, **options)
            if not agents[made].program.exists():
                pytest.skip(f"npm has no {agents[made].program.name} for this machine")
        done = agents[made].ask(prompt, folder, resume=resume, proxy=outside.url)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return asked


def made_in(tmp_path: Path) -> str:
    return (tmp_path / "work" / script.MADE).read_text().strip()


def test_codex_loses_a_shell_call_a_patch_or_a_turn(ask: Callable[..., str], asked: Asked, tmp_path: Path) -> None:
    assert ask(cli.codex, script.FIRST) == script.PATCHED
    assert made_in(tmp_path) == "patched bytes"
    assert asked.all() == [RESPONSES] * 3  # the shell, the patch, the answer
    assert ask(cli.codex, script.SECOND, resume=True) == script.REMEMBERED
    assert asked.all() == [RESPONSES] * 4


@pytest.mark.parametrize("betas", [True, False], ids=["betas", "no betas"])
def test_claude_code_loses_a_call_or_a_turn(ask: Callable[..., str], asked: Asked, tmp_path: Path, betas: bool) -> None:
    assert ask(cli.claude_code, script.FIRST, betas=betas) == script.COUNTED
    assert made_in(tmp_path) == "twelve bytes"
    assert asked.all() == [MESSAGES] * 2
    assert ask(cli.claude_code, script.SECOND, resume=True) == script.REMEMBERED
    assert asked.all() == [MESSAGES] * 3


def test_claude_code_shows_the_model_s_words_as_found_on_the_web(ask: Callable[..., str], asked: Asked) -> None:
    """Its search is a request with one tool, Anthropic's: a refusal reaches the model as the result of its call."""
    assert ask(cli.claude_code, script.SEARCH, only="WebSearch") == script.NOT_FOUND
    assert asked.all() == [MESSAGES, REFUSED, REFUSED, MESSAGES]  # it tries once more


@pytest.mark.parametrize(
    ("sdk", "route"),
    [("@ai-sdk/openai-compatible", CHAT), ("@ai-sdk/openai", RESPONSES), ("@ai-sdk/anthropic", MESSAGES)],
    ids=["chat", "responses", "messages"],
)
def test_opencode_loses_a_call_or_a_turn(ask, asked, tmp_path, sdk, route) -> None:
    assert ask(cli.opencode, script.FIRST, sdk=sdk) == script.COUNTED
    assert made_in(tmp_path) == "twelve bytes"
    assert asked.all() == [route] * 2
    assert ask(cli.opencode, script.SECOND, resume=True) == script.REMEMBERED
    assert asked.all() == [route] * 3
