"""How a server ends, whole or streamed, and that a port is one server's: what both lines have alike."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai import api_server

from npu_gptoss.serving.compat import shutdown
from npu_gptoss.serving.compat.shutdown import stopping_error
from tests.serving.compat.of_line import OLD

if OLD:
    streams = api_server
else:
    from vllm.entrypoints.openai.responses import api_router as streams

pytestmark = pytest.mark.serving


def dead_core(exitcode: int | None, cause: str | None = None) -> Any:
    """The client of an engine core whose process has ended, or is told to. cause: None without the repair
    engine-pulse-client."""
    process = types.SimpleNamespace(name="EngineCore_DP0", exitcode=exitcode)
    manager = types.SimpleNamespace(processes=[process])
    pulse = {} if cause is None else {"npu_gptoss_pulse": types.SimpleNamespace(cause=cause)}
    return types.SimpleNamespace(resources=types.SimpleNamespace(engine_manager=manager), **pulse)


@pytest.mark.parametrize("name", [(), ("server-end-answers",)])
def test_a_streamed_response_ends_with_an_error_and_does_not_break_off(patched: Any, name: tuple[str, ...]) -> None:
    async def events() -> AsyncIterator[Any]:
        yield types.SimpleNamespace(type="first", sequence_number=4, model_dump_json=lambda **options: "{}")
        raise stopping_error()

    async def texts() -> list[str]:
        return [text async for text in streams._convert_stream_to_sse_events(events())]

    with patched(*name):
        if not name:
            with pytest.raises(stopping_error()):
                asyncio.run(texts())
            return
        first, last = asyncio.run(texts())
        assert first.startswith("event: first\n")
        event, data = last.splitlines()[:2]
        assert event == "event: error"
        told = json.loads(data.removeprefix("data: "))
        assert (told["type"], told["sequence_number"], told["message"]) == ("error", 5, str(stopping_error()()))


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


def test_a_drain_that_cannot_be_is_refused_at_the_start(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_GPTOSS_DRAIN_SECONDS", "for ever")
    with patched("server-port"), pytest.raises(SystemExit, match="NPU_GPTOSS_DRAIN_SECONDS='for ever'"):
        api_server.create_server_socket(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("cause", "exitcode", "words"),
    [
        ("ValueError: x\x1b[2J", None, "ValueError: x [2J"),
        ("", -9, "SIGKILL"),
        (None, 3, "exit status 3"),
        ("", None, ""),
    ],
)
def test_the_last_line_names_the_reason(caplog, monkeypatch, cause, exitcode, words):
    monkeypatch.setattr(shutdown.logger, "propagate", True)
    caplog.set_level("ERROR", logger=shutdown.logger.name)
    caplog.handler.setFormatter(None)
    shutdown.logger.addHandler(caplog.handler)
    try:
        with pytest.raises(SystemExit) as ended:
            asyncio.run(shutdown._died(types.SimpleNamespace(engine_core=dead_core(exitcode, cause))))
    finally:
        shutdown.logger.removeHandler(caplog.handler)
    assert ended.value.code == 1
    message = caplog.records[0].getMessage()
    assert words in message
    assert message.isprintable()
