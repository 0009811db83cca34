"""What the end of a server is called, and that a port is one server's. Real ends: tests/serving/test_shutdown.py."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import HTTPException
from fastapi.testclient import TestClient
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.openai.serving_engine import OpenAIServing
from vllm.utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError

from npu_gptoss.serving.compat import shutdown
from npu_gptoss.serving.compat.shutdown import stopping_error

pytestmark = pytest.mark.serving


@pytest.mark.parametrize(("name", "status"), [((), 500), (("server-end-answers",), 503)])
@pytest.mark.parametrize("error", [stopping_error()(), EngineDeadError()])
def test_an_answer_that_the_engines_end_took_may_be_asked_for_again(patched, name, status, error):
    with patched(*name):
        app = api_server.build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]))

        def route(cause: Exception) -> None:
            raise HTTPException(500, detail=str(cause)) from cause

        app.add_api_route("/ended", lambda: route(error))
        app.add_api_route("/failed", lambda: route(ValueError("mine")))
        client = TestClient(app)
        answer = client.get("/ended")
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))
        assert client.get("/failed").status_code == 500


@pytest.mark.parametrize(("name", "code"), [((), 400), (("server-end-errors",), 503)])
def test_a_stream_that_the_engines_end_took_is_no_bad_request(patched: Any, name: tuple[str, ...], code: int) -> None:
    with patched(*name):
        serving = types.SimpleNamespace(log_error_stack=False)
        serving.create_error_response = lambda **fields: OpenAIServing.create_error_response(serving, **fields)
        for error in (stopping_error()(), EngineDeadError()):
            told = json.loads(OpenAIServing.create_streaming_error_response(serving, str(error)))["error"]
            assert (told["code"], told["message"]) == (code, str(error))
        assert OpenAIServing.create_error_response(serving, message="mine").error.code == 400


@pytest.mark.parametrize("name", [(), ("server-end-answers",)])
def test_a_streamed_response_ends_with_an_error_and_does_not_break_off(patched: Any, name: tuple[str, ...]) -> None:
    async def events() -> AsyncIterator[Any]:
        yield types.SimpleNamespace(type="first", sequence_number=4, model_dump_json=lambda indent: "{}")
        raise stopping_error()

    async def texts() -> list[str]:
        return [text async for text in api_server._convert_stream_to_sse_events(events())]

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
        ("", 3, "exit status 3"),
        ("", None, ""),
    ],
)
def test_the_last_line_names_the_reason(caplog, monkeypatch, cause, exitcode, words):
    process = types.SimpleNamespace(name="EngineCore_DP0", exitcode=exitcode)
    manager = types.SimpleNamespace(processes=[process])
    core = types.SimpleNamespace(
        npu_gptoss_pulse=types.SimpleNamespace(cause=cause), resources=types.SimpleNamespace(engine_manager=manager)
    )
    monkeypatch.setattr(shutdown.logger, "propagate", True)
    caplog.set_level("ERROR", logger=shutdown.logger.name)
    caplog.handler.setFormatter(None)
    shutdown.logger.addHandler(caplog.handler)
    try:
        with pytest.raises(SystemExit) as ended:
            asyncio.run(shutdown._died(types.SimpleNamespace(engine_core=core)))
    finally:
        shutdown.logger.removeHandler(caplog.handler)
    assert ended.value.code == 1
    message = caplog.records[0].getMessage()
    assert words in message
    assert message.isprintable()
