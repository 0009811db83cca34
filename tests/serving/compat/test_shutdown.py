"""Status and message when vLLM 0.11's server or engine ends. Real servers: tests/serving/test_shutdown.py."""

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


@pytest.mark.parametrize("error", [stopping_error()(), EngineDeadError()])
def test_answer_cut_by_the_engines_end_gets_503(patched, error):
    with patched("admission"):
        app = api_server.build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]))

        def route(cause: Exception) -> None:
            raise HTTPException(500, detail=str(cause)) from cause

        app.add_api_route("/ended", lambda: route(error))
        app.add_api_route("/failed", lambda: route(ValueError("mine")))
        client = TestClient(app)
        answer = client.get("/ended")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, str(error))
        assert client.get("/failed").status_code == 500


def test_stream_cut_by_the_engines_end_is_no_bad_request(patched: Any) -> None:
    with patched("context-length"):
        serving = types.SimpleNamespace(log_error_stack=False)
        serving.create_error_response = lambda **fields: OpenAIServing.create_error_response(serving, **fields)
        for error in (stopping_error()(), EngineDeadError()):
            told = json.loads(OpenAIServing.create_streaming_error_response(serving, str(error)))["error"]
            assert (told["code"], told["message"]) == (503, str(error))
        assert OpenAIServing.create_error_response(serving, message="mine").error.code == 400
