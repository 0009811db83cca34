"""What vLLM 0.23 refuses, drops or leaves open at its HTTP side, and each repair of it."""

from __future__ import annotations

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.openai.chat_completion.stream_harmony", reason="needs vLLM 0.23")

from openai_harmony import HarmonyError
from vllm.entrypoints import launcher
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.engine.serving import OpenAIServing
from vllm.entrypoints.openai.parser import harmony_utils
from vllm.entrypoints.openai.responses.context import StreamingHarmonyContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.render.serving import OpenAIServingRender
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer

from npu_gptoss.harmony.vocabulary import BASE_VARIABLE
from npu_gptoss.serving.compat.patch import stock
from npu_gptoss.serving.compat.stops import mark
from npu_gptoss.serving.compat.streaming import OneTokenAtATime
from tests.serving.compat.test_channels import Engine

pytestmark = pytest.mark.serving


def render(directory: Path) -> OpenAIServingRender:
    config = types.SimpleNamespace(
        **vars(Engine.model_config) | {"model": str(directory), "tokenizer": str(directory), "revision": None}
    )
    return OpenAIServingRender(
        config, None, None, request_logger=None, chat_template=None, chat_template_content_format="auto"
    )


def test_the_vocabulary_is_found_without_the_network(
    patched: Any, tokenizer_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BASE_VARIABLE, raising=False)
    monkeypatch.setenv("TIKTOKEN_RS_CACHE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setattr(harmony_utils, "_harmony_encoding", None)
    with patched():
        render(tokenizer_directory)
        with pytest.raises(HarmonyError, match="vocab"):
            harmony_utils.get_encoding()
    with patched("harmony-vocabulary"):
        render(tokenizer_directory)
        assert harmony_utils.get_encoding().encode("hello")


@pytest.mark.parametrize(
    "said",
    [
        ValueError("Input length (2126) exceeds model's maximum context length (2048)."),
        "The engine prompt length 2126 exceeds the max_model_len 2048. Please reduce prompt.",  # of /v1/responses
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_clients_know_it(patched: Any, said: Any) -> None:
    with patched("context-length"):
        refused = OpenAIServing.create_error_response(said)
        told = refused.model_dump()["error"]
        assert refused.error.code == 400, "the status"
        assert (told["code"], told["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert told["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
        assert OpenAIServing.create_error_response("another").model_dump()["error"]["code"] == 400
    with patched():
        assert OpenAIServing.create_error_response(said).model_dump()["error"]["code"] == 400, "stock"


def test_a_structure_of_a_completion_binds_from_its_first_token(patched: Any) -> None:
    seen: list[Any] = []
    client = types.SimpleNamespace(**{name: getattr(Engine, name) for name in ("model_config", "renderer")})
    client.input_processor = client.vllm_config = None
    client.generate = lambda *_, **how: seen.append(how.get("reasoning_ended"))
    for repairs in ((), ("completion-structures",)):
        with patched(*repairs):
            serving = OpenAIServingCompletion(client, None, openai_serving_render=None, request_logger=None)
            serving.engine_client.generate({}, None, "id", priority=0)
    assert seen == [None, True]


def test_the_effort_minimal_is_low(patched: Any) -> None:
    def effort(word: str) -> str:
        system, *_ = harmony_utils.build_harmony_preamble(reasoning_effort=word)
        return system.content[0].reasoning_effort.value.lower()

    with patched("effort-words"):
        assert [effort(word) for word in ("minimal", "low", "high")] == ["low", "low", "high"]
    with patched(), pytest.raises(ValueError, match="minimal"):
        effort("minimal")


def test_a_tool_needs_no_description(patched: Any) -> None:
    tool = ChatCompletionToolsParam(function={"name": "f"})
    with patched("tool-description"):
        assert harmony_utils.create_tool_definition(tool).name == "f"
    with patched(), pytest.raises(ValueError, match="description"):
        harmony_utils.create_tool_definition(tool)


def test_a_null_of_responses_is_its_default(patched: Any) -> None:
    async def kept(made: Any, *_: Any) -> Any:
        return await made

    async def create(request: Any, _: Any) -> Any:
        return request.parallel_tool_calls, request.background, request.truncation

    serving = types.SimpleNamespace(_with_kv_transfer_rejection_cleanup=kept, _create_responses=create)

    def asked() -> Any:
        nulls = dict.fromkeys(("parallel_tool_calls", "background", "truncation"))
        request = ResponsesRequest(input="hi", **nulls)
        return asyncio.run(OpenAIServingResponses.create_responses(serving, request, None))

    with patched("responses-nulls"):
        assert asked() == (True, False, "disabled")
    with patched():
        assert asked() == (None, None, None), "stock"


def output(tokens: list[int], finish: str | None) -> Any:
    done = types.SimpleNamespace(token_ids=tokens, finish_reason=finish)
    return types.SimpleNamespace(
        outputs=[done], finished=finish is not None, prompt_token_ids=[1], num_cached_tokens=0, kv_transfer_params=None
    )


def test_a_streamed_response_that_is_cut_off_says_so(patched: Any, tokens: Any) -> None:
    def read(*outputs: Any) -> str | None:
        context = StreamingHarmonyContext([], [], frozenset())
        for each in outputs:
            context.append_output(each)
        return context.finish_reason

    half = output(tokens("<|channel|>final<|message|>Fou"), "length")
    with patched("harmony-parser", "responses-stream-end"):
        assert read(half) == read(output(half.outputs[0].token_ids, None), output([], "length")) == "length"
    with patched():
        assert read(half) is None, "stock"
        with pytest.raises(UnboundLocalError):
            read(output([], "length"))


THOUGHT = "<|channel|>analysis<|message|>One\n\ntwo.<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_stop_string_ends_the_answer_and_not_the_reasoning(patched: Any, tokens: Any) -> None:
    """Of a chat; a completion is stopped where the string is."""
    vocabulary = harmony_utils.get_encoding()

    class Detokenizer(BaseIncrementalDetokenizer):
        def decode_next(self, next_token_id: int) -> str:
            return vocabulary.decode([next_token_id])

    def ended(generated: list[int], marked: bool, **fields: Any) -> int | None:
        parameters = SamplingParams(max_tokens=100, **fields)
        if marked:
            mark(parameters)
        request = types.SimpleNamespace(sampling_params=parameters)
        made = IncrementalDetokenizer.from_new_request(object(), request)
        for count, token in enumerate(generated, 1):
            if made.update([token], False):
                return count
        return None

    before, generated = len(tokens(THOUGHT)), tokens(THOUGHT + "Three\n\nfour.<|return|>")
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow = "vllm.v1.engine.detokenizer.SlowIncrementalDetokenizer"
        monkeypatch.setattr(slow, lambda _, request: Detokenizer(request))
        with patched():
            assert ended(generated, True, stop=["\n\n"]) < before, "stock"
        with patched("answer-stops"):
            assert before < ended(generated, True, stop=["\n\n"]) < len(generated)
            assert ended(generated, True, stop=["One", "final"]) is None
            assert ended(generated, False, stop=["\n\n"]) < before


def test_a_streamed_response_gets_one_token_at_a_time(patched: Any) -> None:
    def client() -> Any:
        return OpenAIServingResponses(
            Engine([1], 1), None, None, request_logger=None, chat_template=None, chat_template_content_format="auto"
        ).engine_client

    with patched("responses-stream-tokens"):
        assert isinstance(client(), OneTokenAtATime)
    with patched():
        assert not isinstance(client(), OneTokenAtATime)


def test_an_idle_connection_stays_open_for_longer_than_clients_keep_theirs(patched: Any) -> None:
    with patched("keep-alive"):
        assert launcher.serve_http is not stock(launcher.serve_http)
    with patched():
        assert launcher.serve_http is stock(launcher.serve_http)
