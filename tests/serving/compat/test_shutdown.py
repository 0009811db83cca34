"""What the end of vLLM 0.11's server is called. Real ends: tests/serving/test_shutdown.py."""

from __future__ import annotations

import json
import types
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

from npu_gptoss.serving.compat.server.shutdown import stopping_error

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
