"""Admission around vLLM's own application: what stock lets through, and what becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai import api_server, protocol
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils import FlexibleArgumentParser
from vllm.v1.engine.processor import Processor

from npu_gptoss.serving.admission.bounded import Bounded
from npu_gptoss.serving.admission.structures import Structures, Verdict
from npu_gptoss.serving.compat import admission
from npu_gptoss.serving.compat.admission import StructureCompiler, misread_refusal, structure_of
from tests.serving.compat.fake_engine import MODEL

pytestmark = pytest.mark.serving

PATCHES = ("admission", "structure-verdicts", "response-formats")
BEARER = {"Authorization": "Bearer secret"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Engine:
    errored = False

    async def get_tokenizer(self) -> Any:
        return range(200_019)

    async def check_health(self) -> None:
        pass


@contextlib.contextmanager
def client(*flags: str) -> Iterator[Any]:
    """vLLM's application with no engine; its exceptions come back as 500."""
    from starlette.testclient import TestClient

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", MODEL, *flags])
    app = api_server.build_app(args)
    model = types.SimpleNamespace(
        get_vocab_size=lambda: 201_088, max_model_len=2048, max_logprobs=20, enable_prompt_embeds=False,
        skip_tokenizer_init=False,
    )  # fmt: skip
    parallel = types.SimpleNamespace(data_parallel_backend="mp")
    app.state.vllm_config = types.SimpleNamespace(model_config=model, parallel_config=parallel)
    app.state.engine_client = Engine()
    app.state.enable_server_load_tracking = False
    app.state.openai_serving_embedding = app.state.openai_serving_scores = None
    yield TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/metrics", "/openapi.json", "/version", "/v1/models"])
def test_the_key_guards_every_route(patched: Any, path: str) -> None:
    """Stock guards what begins with /v1, and on older starlettes not even that from a client with a Host of its own."""
    with patched(*PATCHES), client("--api-key", "secret") as asked:
        for headers in ({}, {"Host": "a/health?"}, {"Host": "a/x?"}):
            assert asked.get(path, headers=headers).status_code == 401
            assert asked.post(path, headers=headers, json=CHAT).status_code == 401
        assert asked.get(path, headers=BEARER).status_code != 401
        assert asked.get("/health").status_code == 200
    with patched(), client("--api-key", "secret") as asked:
        assert (asked.get(path).status_code == 401) is path.startswith("/v1"), "stock"


def test_metrics_are_open_if_asked(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_GPTOSS_OPEN_METRICS", "1")
    with patched(*PATCHES), client("--api-key", "secret") as asked:
        assert asked.get("/metrics").status_code == 200
        assert asked.get("/version").status_code == 401


def test_keys_come_from_the_environment_too(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with patched(*PATCHES), client() as asked:
        assert asked.get("/version").status_code == 401
        assert asked.get("/version", headers=BEARER).status_code == 200


def test_a_proxys_prefix_opens_nothing(patched: Any) -> None:
    with patched(*PATCHES), client("--api-key", "secret", "--root-path", "/api") as asked:
        assert asked.get("/api/v1/models").status_code == 401
        assert asked.get("/api/health").status_code == 200


@pytest.mark.parametrize("body", [b"[1]", b'"x"', b"null", b"1"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_body_that_is_no_object_is_the_clients_mistake(patched: Any, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    with patched(*PATCHES), client() as asked:
        answer = asked.post(path, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "BadRequestError")
    if body != b"null":
        with patched(), client() as asked:
            assert asked.post(path, content=body, headers=headers).status_code == 500, "stock"


def test_what_only_vllm_reads_is_the_clients_mistake_too(patched: Any) -> None:
    """A KeyError in vLLM's own validator: the table of fields does not know that a function needs a name."""
    body = CHAT | {"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    with patched(*PATCHES), client() as asked:
        answer = asked.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "KeyError" in answer.json()["error"]["message"]
    with patched(), client() as asked:
        assert asked.post("/v1/chat/completions", json=body).status_code == 500, "stock"


def test_a_misread_field_is_one_short_sentence(patched: Any) -> None:
    """pydantic repeats the whole body for each of its complaints."""
    body = {"model": MODEL, "messages": [{"role": {"\x1b[2J": 5}, "content": "x" * 10_000}]}
    with patched(*PATCHES), client() as asked:
        error = asked.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"].startswith("messages.0")
        assert len(error["message"]) < 600
        assert error["message"].isprintable()
    assert misread_refusal(["Unsupported Media Type"]).message == "Unsupported Media Type"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v2/rerank"])
def test_what_the_model_cannot_do_is_no_200(patched: Any, path: str) -> None:
    body = {"model": MODEL, "input": "a", "text_1": "a", "text_2": "b", "query": "a", "documents": ["b"]}
    with patched(*PATCHES), client() as asked:
        assert asked.post(path, json=body).status_code == 400


def structured(**fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    ("fields", "means"),
    [
        ({}, {}),
        ({"json_object": False}, {}),
        ({"whitespace_pattern": " "}, {}),
        ({"json_object": True}, {"json_object": True}),
        ({"json": {}}, {"json": {}}),
        ({"regex": ""}, {"regex": ""}),
        ({"choice": ["a"], "disable_fallback": True}, {"choice": ["a"], "disable_fallback": True}),
    ],
)
def test_a_structure_that_asks_for_nothing_is_none(fields: dict[str, Any], means: dict[str, Any]) -> None:
    assert structure_of(StructuredOutputsParams(**fields)) == means


def test_what_was_admitted_is_not_parsed_in_the_server_again(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a regular expression may end the whole server."""
    structures = Structures(None)
    structures._remember('{"regex": "(a"}', Verdict(backend="guidance", automatic=True, fields={"regex": "(b"}))
    monkeypatch.setattr(admission, "_structures", structures)
    config = types.SimpleNamespace(backend="auto")
    reader = types.SimpleNamespace(
        structured_outputs_config=config, model_config=types.SimpleNamespace(skip_tokenizer_init=False)
    )
    with patched(*PATCHES):
        params = structured(regex="(a")
        Processor._validate_structured_output(reader, params)
        wanted = params.structured_outputs
        assert (wanted.regex, wanted._backend, wanted._backend_was_auto) == ("(b", "guidance", True)
        with pytest.raises(ValueError, match="Grammar error"):
            Processor._validate_structured_output(reader, structured(regex="(c"))  # vLLM's own, where nobody asked


FORMATS = [
    ({"type": "text"}, None),
    (None, None),
    ({"type": "json_object"}, {"json_object": True}),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}, {"json": {"type": "null"}}),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, {"json": {}}),
]


@pytest.mark.parametrize(("form", "means"), FORMATS)
def test_a_format_means_the_same_on_every_route(patched: Any, form: Any, means: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    completion = {"prompt": "hi", "response_format": form}
    flat = form and {"type": form["type"], **form.get("json_schema", {})}
    response = {"input": "hi", "text": {"format": flat}} if flat else {"input": "hi"}
    with patched(*PATCHES):
        for params in (
            protocol.ChatCompletionRequest(**chat).to_sampling_params(9, None, {}),
            protocol.CompletionRequest(**completion).to_sampling_params(9, None, {}),
            protocol.ResponsesRequest(**response).to_sampling_params(9, {}),
        ):
            wanted = params.structured_outputs
            assert (None if wanted is None else structure_of(wanted)) == means
    with patched():
        stock = protocol.ChatCompletionRequest(**chat).to_sampling_params(9, None, {}).structured_outputs
        assert (stock is None) is (form is None), "stock: an empty structure, at which the engine dies"
        stock = protocol.CompletionRequest(**completion).to_sampling_params(9, None, {}).structured_outputs
        assert stock is None, "stock: dropped"


def test_a_format_does_not_replace_what_else_was_asked(patched: Any) -> None:
    fields = {"prompt": "a", "guided_choice": ["x"], "response_format": {"type": "text"}}
    with patched(*PATCHES):
        params = protocol.CompletionRequest(**fields).to_sampling_params(9, None, {})
        assert structure_of(params.structured_outputs) == {"choice": ["x"]}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bounded]:
    """vLLM's own validation and backends on the tiny model's tokenizer, in bounded processes."""
    from vllm.config import ModelConfig, StructuredOutputsConfig

    from npu_gptoss.tiny.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("compiler")
    write_tiny(folder, trained=True, mxfp4=True)
    config = types.SimpleNamespace(
        model_config=ModelConfig(model=str(folder), max_model_len=256),
        structured_outputs_config=StructuredOutputsConfig(),
        speculative_config=None,
    )
    work = StructureCompiler(config)
    bounded = Bounded(work.work, work.prepare, seconds=4)
    try:
        yield bounded
    finally:
        bounded.stop()


# what is asked, and the backend that takes it; None where none does
STRUCTURES: list[tuple[dict[str, Any], str | None]] = [
    ({"json_object": True}, "xgrammar"),
    ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "xgrammar"),
    ({"json": {"type": "object", "patternProperties": {"a": {"type": "integer"}}}}, "guidance"),
    ({"choice": ["spring", "autumn"]}, "xgrammar"),
    ({"regex": "[0-9]{3}"}, "xgrammar"),
    ({"grammar": 'root ::= "a" | "b"'}, "xgrammar"),
    ({"choice": []}, None),
    ({"regex": "\x00"}, None),  # SIGSEGV in xgrammar 0.1.25
    ({"regex": "("}, None),
    ({"grammar": ""}, None),
    ({"grammar": "root ::= nothing"}, None),
    ({"json": "{"}, None),
    ({"json": {"type": "nothing"}}, None),
    ({"structural_tag": "{}"}, None),
    ({"structural_tag": "no json"}, None),
]


def test_a_refusal_says_why_where_vllm_forgot_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sentence about choices that xgrammar cannot take ends in the letters {err}."""

    def compile_badly(self: StructureCompiler, fields: dict[str, Any]) -> None:
        raise ValueError("Failed to transform choices into a grammar: {err}") from RuntimeError("a line break")

    monkeypatch.setattr(StructureCompiler, "compile", compile_badly)
    said = json.loads(StructureCompiler(types.SimpleNamespace()).work(b"{}"))["error"]
    assert said.endswith("grammar: a line break")


@pytest.mark.slow
def test_structures_are_taken_by_a_backend_or_refused(compiler: Bounded) -> None:
    """One that a backend takes in validation and refuses when it compiles ended the engine."""
    structures = Structures(compiler)

    async def verdicts() -> list[Verdict]:
        return [await structures.verdict(fields) for fields, _ in STRUCTURES]

    found = asyncio.run(verdicts())
    assert [verdict.backend for verdict in found] == [backend for _, backend in STRUCTURES], found
    for verdict in found:
        assert (verdict.error is None) is (verdict.backend is not None)
        assert verdict.error is None or verdict.error.isprintable()


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["c\nd", 'a"b', "a\\b", "\u00e9\u4e2d", "a\tb", "]", "[^a]", "'", "|"])
def test_a_choice_of_any_text_is_served(compiler: Bounded, choice: str) -> None:
    verdict = asyncio.run(Structures(compiler).verdict({"choice": [choice, "x"]}))
    assert verdict.backend is not None, verdict.error
