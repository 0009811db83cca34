"""Admission around vLLM's own application: keys, unreadable bodies and unsupported routes."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest

from npu_gptoss.serving.compat.server.admission import VllmServer, can_be_scaled
from npu_gptoss.serving.openai.errors import misread
from tests.serving.compat import of_release

PATCHES = ("admission",)
MODEL = "gpt-oss"
BEARER = {"Authorization": "Bearer secret"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class Engine:
    errored = False

    async def get_tokenizer(self) -> Any:
        return range(200_019)

    async def check_health(self) -> None:
        pass

    async def abort(self, request_ids: Any) -> None:
        pass


@contextlib.contextmanager
def client(*flags: str) -> Iterator[Any]:
    """vLLM's application without an engine; its exceptions become status 500."""
    from starlette.testclient import TestClient

    app = of_release.application(of_release.parsed("--model", MODEL, *flags))
    model = types.SimpleNamespace(
        get_vocab_size=lambda: 201_088, max_model_len=2048, max_logprobs=20, enable_prompt_embeds=False,
        skip_tokenizer_init=False, is_multimodal_model=False,
    )  # fmt: skip
    parallel = types.SimpleNamespace(data_parallel_backend="mp")
    app.state.vllm_config = types.SimpleNamespace(model_config=model, parallel_config=parallel)
    app.state.engine_client = Engine()
    app.state.enable_server_load_tracking = False
    app.state.openai_serving_embedding = app.state.openai_serving_scores = None
    yield TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/metrics", "/openapi.json", "/version", "/v1/models"])
def test_key_guards_every_route(patched: Any, path: str) -> None:
    """Stock guards only paths below /v1, and on older starlettes a forged Host header opens these too."""
    with patched(*PATCHES), client("--api-key", "secret") as asked:
        for headers in ({}, {"Host": "a/health?"}, {"Host": "a/x?"}):
            assert asked.get(path, headers=headers).status_code == 401
            assert asked.post(path, headers=headers, json=CHAT).status_code == 401
        assert asked.get(path, headers=BEARER).status_code != 401
        assert asked.get("/health").status_code == 200


def test_metrics_are_open_if_asked(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_GPTOSS_OPEN_METRICS", "1")
    with patched(*PATCHES), client("--api-key", "secret") as asked:
        assert asked.get("/metrics").status_code == 200
        assert asked.get("/version").status_code == 401


def test_answers_are_not_counted(patched: Any) -> None:
    """0.33 builds the middlewares before ours are among them; counters that are made again count nothing."""
    with patched(*PATCHES), client() as asked:
        asked.get("/v1/models/none/such")
        assert "http_requests_total{" in asked.get("/metrics").text


def test_root_path_opens_no_route(patched: Any) -> None:
    with patched(*PATCHES), client("--api-key", "secret", "--root-path", "/api") as asked:
        assert asked.get("/api/v1/models").status_code == 401
        assert asked.get("/api/health").status_code == 200


class Gateway:
    """A user's middleware that knows another key."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        known = [(b"authorization", b"Bearer secret")] if (b"x-of-gateway", b"1") in scope.get("headers", ()) else []
        await self.app(scope | {"headers": [*scope.get("headers", ()), *known]}, receive, send)


PAGE = "http://a.example"
FLAGS = ("--api-key", "secret", "--allowed-origins", f'["{PAGE}"]')
MORE = ("--enable-request-id-headers", "--middleware", f"{__name__}.Gateway")


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 401), (BEARER, 400), ({"X-Of-Gateway": "1"}, 400), ({"X-Of-Gateway": "2"}, 401)]
)
def test_a_refusal_passes_cors_ids_and_the_users_middleware(patched: Any, headers: dict[str, str], status: int) -> None:
    """Else a page in a browser learns of no reason, and a gateway's own keys open nothing."""
    own = {"Origin": PAGE, "X-Request-Id": "mine", "Content-Type": "application/json"}
    with patched(*PATCHES), client(*FLAGS, *MORE) as asked:
        answer = asked.post("/v1/chat/completions", headers=own | headers, content=b"no json")
    found = answer.status_code, answer.headers.get("access-control-allow-origin"), answer.headers.get("x-request-id")
    assert found == (status, PAGE, "mine")


def test_a_preflight_needs_no_key_and_nothing_else_hides_as_one(patched: Any) -> None:
    origin, wants = {"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}
    with patched(*PATCHES), client(*FLAGS) as asked:
        assert asked.options("/v1/models", headers=origin | wants).status_code == 200
        assert asked.options("/v1/models", headers=origin).status_code == 401
        assert asked.get("/v1/models", headers=origin | wants).status_code == 401


def test_keys_come_from_the_environment_too(patched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with patched(*PATCHES), client() as asked:
        assert asked.get("/version").status_code == 401
        assert asked.get("/version", headers=BEARER).status_code == 200


def test_error_in_vllms_own_validator_gets_400(patched: Any) -> None:
    """A KeyError in vLLM's own validator: the table of fields does not know that a function needs a name."""
    body = CHAT | {"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    with patched(*PATCHES), client() as asked:
        answer = asked.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "KeyError" in answer.json()["error"]["message"]


READING = """
def to_sampling_params():
    try:
        {first}
    except Exception as error:
        raise RuntimeError("as pydantic_extra_types says it") from error
"""


@pytest.mark.parametrize(("first", "of_the_client"), [("import no_such_package", False), ("{}['function']", True)])
def test_missing_package_of_the_server_does_not_blame_the_client(first: str, of_the_client: bool) -> None:
    """A server without pycountry refused every chat as unreadable, and its log did not name the reason."""
    vllm_s: dict[str, Any] = {"__name__": "vllm.somewhere"}
    exec(READING.format(first=first), vllm_s)
    with pytest.raises(RuntimeError) as raised:
        vllm_s["to_sampling_params"]()
    assert (VllmServer(None, None).blame(raised.value) is not None) is of_the_client


@pytest.mark.parametrize(
    ("backend", "elastic", "scales"),
    [("ray", None, True), ("mp", None, False), ("mp", True, True), ("ray", False, False)],
)
def test_a_server_started_to_be_scaled_is_not_refused(backend: str, elastic: bool | None, scales: bool) -> None:
    more = {} if elastic is None else {"enable_elastic_ep": elastic}
    assert can_be_scaled(types.SimpleNamespace(data_parallel_backend=backend, **more)) is scales


def test_misread_field_gets_one_short_sentence(patched: Any) -> None:
    """pydantic repeats the whole body in each of its errors."""
    body = {"model": MODEL, "messages": [{"role": {"\x1b[2J": 5}, "content": "x" * 10_000}]}
    with patched(*PATCHES), client() as asked:
        error = asked.post("/v1/chat/completions", json=body).json()["error"]
        assert error["param"].startswith("messages[0]")
        assert len(error["message"]) < 600
        assert error["message"].isprintable()
    assert misread(["Unsupported Media Type"]).message == "Unsupported Media Type"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v2/rerank"])
def test_route_without_a_serving_object_gets_400(patched: Any, path: str) -> None:
    body = {"model": MODEL, "input": "a", "text_1": "a", "text_2": "b", "query": "a", "documents": ["b"]}
    with patched(*PATCHES), client() as asked:
        assert asked.post(path, json=body).status_code == 400
