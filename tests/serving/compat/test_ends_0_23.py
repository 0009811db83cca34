"""How vLLM 0.23's server ends, and that its port is its own."""

from __future__ import annotations

import asyncio
import json
import types
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.openai.chat_completion.stream_harmony", reason="needs vLLM 0.23")

import uvicorn
from vllm.entrypoints import launcher
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.engine.serving import OpenAIServing
from vllm.entrypoints.serve.utils import server_utils
from vllm.v1.engine.exceptions import EngineDeadError

pytestmark = pytest.mark.serving


class Server(uvicorn.Server):
    """Serves nothing until it shall exit; then vLLM's application has no state any more."""

    async def serve(self, sockets: Any = None) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)
        del self.config.app.state


def ended(monkeypatch: pytest.MonkeyPatch, errored: bool) -> None:
    """A server whose engine dies, or that is told to end by a program, as vLLM awaits it."""
    process = types.SimpleNamespace(name="EngineCore_DP0", exitcode=-9)
    manager = types.SimpleNamespace(processes=[process])
    core = types.SimpleNamespace(resources=types.SimpleNamespace(engine_manager=manager))
    engine = types.SimpleNamespace(errored=errored, is_running=not errored, engine_core=core)
    app = types.SimpleNamespace(routes=[], state=types.SimpleNamespace(engine_client=engine))
    monkeypatch.setattr(launcher.uvicorn, "Server", Server)
    monkeypatch.setattr(launcher.uvicorn.Config, "load", lambda self: None)

    async def serve() -> None:
        if not errored:
            asyncio.get_running_loop().call_later(0.1, lambda: setattr(app.state.server, "should_exit", True))
        await (await launcher.serve_http(app, None, port=0))

    asyncio.run(asyncio.wait_for(serve(), 20))


def test_an_engine_s_death_is_an_exit_status_and_another_end_is_none(
    patched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patched("server-end"):
        with pytest.raises(SystemExit) as end:
            ended(monkeypatch, errored=True)
        assert end.value.code == 1
        ended(monkeypatch, errored=False)
    with patched():
        ended(monkeypatch, errored=True)


@pytest.mark.parametrize(("name", "code"), [((), 500), (("server-end-errors",), 503)])
def test_a_request_that_the_engine_s_end_took_may_be_asked_for_again(
    patched: Any, name: tuple[str, ...], code: int
) -> None:
    request = types.SimpleNamespace(app=types.SimpleNamespace(state=types.SimpleNamespace()), state=None)
    request.app.state.args = types.SimpleNamespace(log_error_stack=False)
    request.app.state.server = types.SimpleNamespace()
    request.app.state.engine_client = types.SimpleNamespace(errored=False, is_running=True)
    with patched(*name):
        answer = asyncio.run(server_utils.engine_error_handler(request, EngineDeadError()))
        streamed = OpenAIServing.create_streaming_error_response(OpenAIServing, EngineDeadError())
        assert (answer.status_code, json.loads(streamed)["error"]["code"]) == (code, code)
        assert OpenAIServing.create_error_response("mine").error.code == 400


@pytest.mark.parametrize("name", [(), ("server-port",)])
def test_a_second_server_does_not_share_the_port(patched: Any, name: tuple[str, ...]) -> None:
    with patched(*name), api_server.create_server_socket(("127.0.0.1", 0)) as first:
        first.listen()
        port = first.getsockname()[1]
        if not name:
            api_server.create_server_socket(("127.0.0.1", port)).close()  # the kernel would deal the connections out
            return
        with pytest.raises(SystemExit, match=f"127.0.0.1 port {port}: Address already in use"):
            api_server.create_server_socket(("127.0.0.1", port))
