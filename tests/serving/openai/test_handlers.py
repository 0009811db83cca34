"""Handlers without a server: cases that no script of tests/serving/scripted.py can produce."""

from __future__ import annotations

import asyncio
import gc
import math
import types
import weakref
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import ParallelConfig
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from npu_gptoss.frontend import responses as frontend
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.sample import Facts
from npu_gptoss.serving import compat
from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.server.failed_requests import RequestRefused
from npu_gptoss.serving.compat.server.shutdown import stopping_error
from npu_gptoss.serving.openai import chat, engine, intake, responses, routes
from npu_gptoss.serving.openai.release import A_CHAT, release
from npu_gptoss.serving.releases import vllm as names
from npu_gptoss.serving.tokenizer_file import checkpoint_directory
from tests.harmony.conftest import directory, encoder, library  # noqa: F401
from tests.serving.conftest import found

pytestmark = pytest.mark.serving


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch, library: Any, encoder: Any) -> Any:  # noqa: F811
    """vLLM's serving object, as far as the handlers need it. Its engine ends after the first token with `error`."""

    async def known(_: Any) -> None:
        return None

    made = types.SimpleNamespace(
        model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace(model_type="gpt_oss"), max_model_len=4096),
        enable_store=False, response_store={}, msg_store={}, enable_log_outputs=False, request_logger=None,
        response_role="assistant", enable_prompt_tokens_details=False, response_store_lock=asyncio.Lock(),
        _check_model=known, _base_request_id=lambda *_: "1", error=None,
    )  # fmt: skip

    async def start(_: Any, asked: Any, name: str, *__: Any, **___: Any) -> Any:
        async def steps() -> AsyncIterator[Step]:
            yield Step([Piece(0, [200005])])
            raise made.error

        plain = types.SimpleNamespace(logprobs=None)
        params = dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens"))
        return types.SimpleNamespace(
            serving=made, name=name, model="m", prompt=[1], plain=plain, params=types.SimpleNamespace(**params),
            outputs=steps(), step=lambda step: step, asked=asked, turn=lambda: asked.turn(encoder), whole=True,
        )  # fmt: skip

    for module in (chat, responses):
        monkeypatch.setattr(module, "start", start)
    return made


def ask(serving: Any, api: Any, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "hi"}]} if api is chat else {"input": "hi"}
    raw = types.SimpleNamespace(scope={intake.BODY: body | fields, intake.WARNINGS: []})
    request = types.SimpleNamespace(use_beam_search=False, request_id="1")
    return asyncio.run(api.create(None, serving, request, raw))


@pytest.mark.parametrize("api", [chat, responses])
@pytest.mark.parametrize("error", [EngineDeadError(), stopping_error()()], ids=["died", "told to stop"])
def test_answer_that_the_engines_end_took_may_not_be_asked_for_again(serving: Any, api: Any, error: Exception) -> None:
    serving.error = error
    answer = ask(serving, api)
    assert (answer.error.code, answer.error.message) == (503, str(error))


class Full(Exception):
    """As a full queue of vLLM 0.33 (--max-num-queued-reqs), which is no error of the server."""

    http_status = 503


@pytest.mark.parametrize("api", [chat, responses])
@pytest.mark.parametrize(
    ("error", "status"), [(RequestRefused("no such token"), 400), (RuntimeError("it broke"), 500), (Full("busy"), 503)]
)
def test_request_that_fails_in_the_engine_ends_a_batch_file(serving: Any, api: Any, error: Any, status: int) -> None:
    """Raised, vLLM 0.11's `run-batch` ends with every other answer, and its routes answer each with 500."""
    serving.error = error
    answer = ask(serving, api)
    assert (answer.error.code, answer.error.message) == (status, str(error))


def test_missing_response_does_not_say_how_responses_are_stored(serving: Any) -> None:
    for answer in (ask(serving, responses, previous_response_id="resp_1"), responses.not_found(serving, "resp_1")):
        assert answer.error.code == 404
        assert "VLLM_ENABLE_RESPONSES_API_STORE=1" in answer.error.message
    refused = ask(serving, responses, background=True)
    assert (refused.error.code, refused.model_dump()["error"]["param"]) == (400, "background")


@pytest.mark.parametrize(("servers", "told"), [(1, False), (2, True)])
def test_response_of_another_api_server_is_missing_without_a_reason(serving: Any, servers: int, told: bool):
    config = types.SimpleNamespace(parallel_config=ParallelConfig(_api_process_count=servers))
    serving.enable_store, serving.engine_client = True, types.SimpleNamespace(vllm_config=config)
    compat.apply()
    modules = ("vllm.entrypoints.openai.responses.serving", "vllm.entrypoints.openai.serving_responses")
    vllms = found("OpenAIServingResponses", *modules)
    answer = vllms._make_not_found_error(serving, "resp_1")  # of its routes that retrieve and cancel
    assert (answer.error.code, "2 API servers" in answer.error.message) == (404, told)


def test_schema_or_earlier_call_of_a_batch_file_is_lost() -> None:
    """`vllm run-batch` has no HTTP body, only vLLM's request."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    }
    assert intake.fields_of(names.ChatCompletionRequest.model_validate(body)) == body


def test_request_of_another_model_or_with_tools_of_the_server_is_taken(serving: Any) -> None:
    async def original(*_: Any) -> str:
        return "vLLM's own"

    for change in ({"model_config": types.SimpleNamespace(hf_config=None)}, {"tool_server": object()}):
        other = types.SimpleNamespace(**vars(serving) | change)
        for api in (chat, responses):
            assert (
                asyncio.run(api.create(original, other, types.SimpleNamespace(use_beam_search=False))) == "vLLM's own"
            )
    searching = types.SimpleNamespace(use_beam_search=True)
    assert asyncio.run(chat.create(original, serving, searching)) == "vLLM's own"


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_instructions_go_elsewhere_than_vllms_variable_says(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS", wanted)
    assert release().defaults(types.SimpleNamespace()).instructions_in_system == (wanted == "1")


def test_checkpoint_in_the_hugging_face_cache_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "hub" / "models--openai--gpt-oss-20b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    for name in ("main", "tokenizer"):
        (refs / name).write_text("abc")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config = types.SimpleNamespace(tokenizer=None, tokenizer_revision=None, model="openai/gpt-oss-20b", revision=None)
    assert checkpoint_directory(config) == snapshot
    config.tokenizer, config.tokenizer_revision, config.revision = config.model, "tokenizer", "weights"
    assert checkpoint_directory(config) == snapshot, "the tokenizer has a revision of its own"
    config.tokenizer_revision = "another"
    assert checkpoint_directory(config) is None
    config.model = str(tmp_path / "no such folder")
    assert checkpoint_directory(config) is None


@pytest.mark.parametrize(
    ("kind", "comments"), [(b"text/event-stream; charset=utf-8", True), (b"application/json", False)]
)
def test_silent_stream_is_ended_by_a_proxy_or_stays_in_memory(monkeypatch, kind, comments) -> None:
    monkeypatch.setattr(intake, "KEEP_ALIVE", 0.02)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"start"))

    async def answer() -> None:
        told = intake._Sent({intake.WARNINGS: []}, send)
        await told({"type": "http.response.start", "headers": [(b"content-type", kind)]})
        await asyncio.sleep(0.1)
        await told({"type": "http.response.body", "body": b"data", "more_body": True})
        await told({"type": "http.response.body", "body": b""})
        await asyncio.sleep(0.1)
        known = weakref.ref(told)
        del told
        assert known() is None, "a cycle, for which Python seldom looks in a server"

    gc.disable()
    try:
        asyncio.run(answer())
    finally:
        gc.enable()
    first, *between, data, last = sent
    assert (first, data, last) == (b"start", b"data", b"")
    assert set(between) == ({b": keep-alive\n\n"} if comments else set())


@pytest.mark.parametrize(
    ("model_type", "parser", "template", "told"),
    [
        ("gpt_oss", "hermes", None, ["--tool-call-parser hermes"]),
        ("gpt_oss", "hermes", "a.jinja", ["--chat-template", "--tool-call-parser hermes"]),
        ("gpt_oss", "openai", None, []),
        ("gpt_oss", None, None, []),
        ("llama", "hermes", "a.jinja", []),  # vLLM's own handlers read both
    ],
)
def test_option_without_effect_goes_unsaid(monkeypatch, model_type, parser, template, told) -> None:
    said: list[str] = []
    monkeypatch.setattr(engine.logger, "warning", lambda _, *words: said.extend(words))
    monkeypatch.setattr(engine, "checkpoint_directory", lambda _: None)
    model = types.SimpleNamespace(hf_config=types.SimpleNamespace(model_type=model_type))
    engine.report_unused(model, types.SimpleNamespace(tool_call_parser=parser, chat_template=template))
    assert [name for names in said for name in names.split(" and ")] == told


def test_deleted_response_comes_back_when_its_work_ends() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app, cancelled = FastAPI(), []
    routes.add_routes(app)
    stores = {name: {"resp_1": "kept"} for name in ("response_store", "msg_store", "event_store")}
    task = types.SimpleNamespace(cancel=lambda: cancelled.append("resp_1"))
    app.state.openai_serving_responses = types.SimpleNamespace(
        **stores, response_store_lock=asyncio.Lock(), background_tasks={"resp_1": task}
    )
    assert TestClient(app).delete("/v1/responses/resp_1").status_code == 200
    assert ([*stores.values()], cancelled) == ([{}, {}, {}], ["resp_1"])


def test_structure_that_cannot_be_checked_now_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tools whose schemas no grammar holds are called without one."""
    tried: list[Any] = []

    async def busy(_: Any, __: Any, asked: Any) -> Any:
        tried.append(asked)
        raise Refusal("busy", status=HTTPStatus.SERVICE_UNAVAILABLE)

    monkeypatch.setattr(engine, "_hold_to", busy)
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked = frontend.read({"input": "hi", "tools": [tool], "tool_choice": "required"}).asked
    with pytest.raises(Refusal, match="busy"):
        asyncio.run(engine._hold(None, None, asked, None))
    assert tried == [asked]


def test_started_request_loses_what_the_release_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapter, its place in the queue, and a prompt that another server has encoded."""
    told: dict[str, Any] = {}
    params = types.SimpleNamespace(stop=None, prompt_logprobs=None)

    async def generate(*_: Any, **keywords: Any) -> None:
        told.update(keywords)

    here = types.SimpleNamespace(
        preflight=lambda _, samples: told.update(samples=samples),
        reused_prompt=lambda *_: [1, 2, 3],
        sampling=lambda _, __, tokens: told.update(tokens=tokens) or params,
        hold=lambda *_: {"reasoning_ended": True},
        scheduling=lambda *_: {"priority": 5},
        generate=generate,
        frames=True,
    )
    monkeypatch.setattr(engine, "release", lambda: here)
    models = types.SimpleNamespace(model_name=lambda adapter: f"of {adapter}")
    serving = types.SimpleNamespace(models=models, _maybe_get_adapters=lambda _: "an adapter", engine_client=None)
    monkeypatch.setattr(engine.structures, "check", generate)
    monkeypatch.setattr(engine.structures, "structure_of", lambda _: {})
    params.structured_outputs = None
    raw = types.SimpleNamespace(state=types.SimpleNamespace(), scope={intake.WARNINGS: []})
    plain = names.ChatCompletionRequest.model_validate({"messages": engine.PLACEHOLDER, "n": 2})
    asked = frontend.read({"input": "hi", "stop": "x"}).asked
    started = asyncio.run(engine.start(serving, asked, "chatcmpl-1", raw, plain, stream=True))
    assert (started.prompt, started.model, started.whole) == ([1, 2, 3], "of an adapter", False)
    assert told == {"samples": 2, "tokens": 3, "reasoning_ended": True, "priority": 5}
    engine.use(raw, {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7})  # a user's middleware reads them
    metadata = raw.state.request_metadata
    assert (metadata.request_id, metadata.final_usage_info.total_tokens) == ("chatcmpl-1", 7)
    assert (params.detokenize, params.output_kind) == (False, RequestOutputKind.DELTA)  # ends at the stop string
    serving.enable_prompt_tokens_details, serving.enable_log_outputs = True, False
    facts = engine.facts_of(Facts, started)
    assert (facts.prompt_tokens, facts.cached_details, facts.log) == (3, True, None)
    here.raise_if_error, here.about_choice = lambda *_: None, lambda *_: None
    here.about_answer = lambda *given: {"tokens": given[-1]}
    for reason, extra in ((None, None), ("stop", {"tokens": 4})):  # of which vLLM 0.33 makes tokens per second
        piece = types.SimpleNamespace(index=0, token_ids=[7, 8], finish_reason=reason, stop_reason=9, logprobs=None)
        output = types.SimpleNamespace(outputs=[piece], finished=bool(reason), prompt_logprobs=None)
        output.num_cached_tokens = 0
        step = started.step(output)
        assert (step.extra, step.pieces[0].stop_reason) == (extra, 9 if reason else None)


def test_engine_gets_no_trace_no_adapter_and_no_salt() -> None:
    told: list[Any] = []

    async def headers(given: Any) -> Any:
        return {"of": given}

    serving = types.SimpleNamespace(
        engine_client=types.SimpleNamespace(generate=lambda *given, **named: told.extend((*given, named))),
        _maybe_get_adapters=lambda request: f"adapter of {request.model}",
        _get_trace_headers=headers,
        _log_inputs=lambda *given, **named: told.append((*given, named)),
    )
    request = names.ChatCompletionRequest.model_validate({**A_CHAT, "model": "m", "cache_salt": "s"})
    raw = types.SimpleNamespace(headers="sent")
    asyncio.run(release().generate(serving, request, raw, "chatcmpl-1", [1, 2], "params", priority=1))
    logged, inputs, *given, named = told
    adapter = {"lora_request": "adapter of m"}
    assert logged == ("chatcmpl-1", [1, 2], {"params": "params", **adapter})
    assert (inputs["prompt_token_ids"], inputs["cache_salt"], given) == ([1, 2], "s", ["params", "chatcmpl-1"])
    assert named == {"priority": 1, "trace_headers": {"of": "sent"}, **adapter}


def test_answers_are_logged_that_no_option_asks_for() -> None:
    told: list[dict[str, Any]] = []
    logs = types.SimpleNamespace(log_outputs=lambda **named: told.append(named))
    server = types.SimpleNamespace(enable_log_outputs=False, request_logger=logs, enable_log_deltas=False)
    assert engine.output_logger(server, "x", True) is None
    server.enable_log_outputs = True
    for streamed in (True, False):
        log = engine.output_logger(server, "x", streamed)
        log("a", [1], None)
        log("ab", None, "stop")
    assert [one["finish_reason"] for one in told] == ["streaming_complete", "stop"]
    server.enable_log_deltas = True
    engine.output_logger(server, "x", True)("a", [1], None)
    assert (told[-1]["outputs"], told[-1]["output_token_ids"], told[-1]["delta"]) == ("a", [1], True)


def test_answer_of_a_prefill_server_lacks_its_transfer_parameters() -> None:
    output = types.SimpleNamespace(kv_transfer_params={"block": 1})
    request = names.ChatCompletionRequest.model_validate(A_CHAT | {"n": 2})
    assert release().about_answer(None, request, output, 3) == {"kv_transfer_params": {"block": 1}}


def test_impossible_token_has_a_logprob_that_json_lacks(encoder: Any) -> None:  # noqa: F811
    plain = types.SimpleNamespace(top_logprobs=1, return_tokens_as_token_ids=False)
    serving = types.SimpleNamespace(npu_gptoss_encoder=encoder)
    started = engine.Started(serving, "x", None, [], plain, None, None, "m", whole=True)
    known = {7: Logprob(-math.inf), 8: Logprob(-0.5)}
    (one,) = started.logprobs(Piece(0, [7], None, None, [known]), [0])
    assert (one["logprob"], [top["logprob"] for top in one["top_logprobs"]]) == (-9999.0, [-0.5])
    assert engine._logprobs(known)["7"]["logprob"] == -9999.0
