"""Admission before a server that accepts everything: its refusals, and the requests that it passes on."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import Iterable
from http import HTTPStatus
from types import TracebackType
from typing import Any

import pytest

from npu_gptoss.serving.admission.keys import KeyGuard
from npu_gptoss.serving.admission.middleware import LARGE, AdmissionMiddleware
from npu_gptoss.serving.admission.refusal import Refusal, answer
from npu_gptoss.serving.admission.rules import Limits
from tests.serving.hostile import HOSTILE, Hostile

LIMITS = Limits(vocab_size=201_088, tokenizer_size=200_019, max_model_len=2048, max_logprobs=20)
JSON = ((b"content-type", b"application/json"),)
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Taken:
    """A server that reads the body, answers 200, and records the request; or it raises `fails`."""

    def __init__(self, fails: BaseException | None = None, begins: bool = False) -> None:
        self.fails, self.begins, self.received, self.scopes = fails, begins, [], []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        self.received.append((await receive())["body"])
        if self.fails is None or self.begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.fails is not None:
            raise self.fails
        await send({"type": "http.response.body", "body": b""})


class AnyServer:
    def __init__(self) -> None:
        self.counted: list[int] = []
        self.down, self.waited = "", []  # why there is no engine; how it was asked

    def refused(self, status: int) -> None:
        self.counted.append(int(status))

    def check_route(self, route: str) -> None:
        pass

    async def check_engine(self, *, waits: bool) -> None:
        self.waited.append(waits)
        if self.down:
            raise Refusal(self.down, status=HTTPStatus.SERVICE_UNAVAILABLE, retry_after=7)

    async def limits(self) -> Limits:
        return LIMITS

    async def check_structure(self, route: str, body: dict[str, Any]) -> None:
        pass

    def blame(self, error: BaseException) -> Refusal | None:
        return Refusal("unreadable") if isinstance(error, KeyError) else None


def admission(app: Any = None, keys: tuple[str, ...] = (), metrics: bool = False, most: int = 1 << 20) -> Any:
    return AdmissionMiddleware(app or Taken(), KeyGuard(keys, metrics), AnyServer(), most)


def chunk(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


GONE = {"type": "http.disconnect"}


def ask(
    asked: AdmissionMiddleware,
    path: str = CHAT,
    body: Any = b"",
    method: str = "POST",
    headers: tuple[tuple[bytes, bytes], ...] = JSON,
    messages: Iterable[dict[str, Any]] | None = None,
    **scope: Any,
) -> tuple[int | None, dict[str, Any]]:
    """Returns status and JSON of the answer; status None if nothing was sent.

    body: bytes, or an object to write as JSON. messages: the client's messages in place of one with the body; after
    the last it leaves.
    """
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    coming = iter([chunk(raw)] if messages is None else messages)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(coming, GONE)

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "method": method, "path": path, "headers": list(headers)} | scope
    asyncio.run(asked(whole, receive, send))
    if not sent:
        return None, {}
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0].get("status", sent[0]["type"]), json.loads(text) if text else {}


BY_ADMISSION = [case for case in HOSTILE if case.needs == "admission"]


@pytest.mark.parametrize("case", BY_ADMISSION, ids=lambda case: case.name)
def test_hostile_request_is_refused_by_admission(case: Hostile) -> None:
    app = Taken()
    status, body = ask(admission(app), case.route, case.body)
    assert status == case.status
    if status == 200:
        assert app.received == [case.body]
        return
    assert not app.received, "vLLM has heard of it"
    error = body["error"]
    assert (error["param"], error["code"]) == (case.param, 400)
    assert error["message"].isprintable()
    assert len(error["message"]) < 500
    assert case.param is None or case.param in error["message"]


def test_a_refused_body_is_not_kept() -> None:
    """An exception keeps the frames of each of its raises, with their bodies: one for all refusals kept them for ever,
    one in a variable of its own frame until Python looked for cycles."""

    def tracebacks() -> int:
        return sum(type(found) is TracebackType for found in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = tracebacks()
        for case, asked in itertools.product(
            BY_ADMISSION, (admission(), admission(most=100), admission(keys=("key",)))
        ):
            ask(asked, case.route, case.body)
        assert tracebacks() == before
    finally:
        gc.enable()


def test_an_accepted_body_and_its_disconnect_pass_unchanged() -> None:
    """vLLM ends a request when its client leaves; without the disconnect it would run on."""
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.extend([await receive(), await receive()])

    raw = json.dumps(BODY, indent=3).encode()
    ask(admission(app), messages=[chunk(raw[:7], True), chunk(b"", True), chunk(raw[7:])])
    assert heard == [chunk(raw), GONE]


def test_an_incomplete_body_does_not_reach_vllm() -> None:
    app = Taken()
    assert ask(admission(app), messages=[chunk(b'{"a', True)]) == (None, {})
    assert not app.received


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_not_held(declared: bool) -> None:
    """Without a Content-Length (chunked) only counting shows the size."""
    app, endless = Taken(), itertools.count()
    length = ((b"content-length", b"5001"),) if declared else ()
    coming = (chunk(b"x" * 1000, True) for _ in endless)
    assert ask(admission(app, most=5000), "/anything", headers=(*JSON, *length), messages=coming)[0] == 413
    assert next(endless) == (0 if declared else 6)
    assert not app.received


def test_bodies_that_are_no_json_are_left_to_their_routes() -> None:
    app = Taken()
    status, _ = ask(
        admission(app), "/v1/audio/transcriptions", b"\xff\xfe", headers=((b"content-type", b"multipart/form-data"),)
    )
    assert (status, app.received) == (200, [b"\xff\xfe"])


@pytest.mark.parametrize("kind", [b"application/json; charset=utf-8", b"Application/JSON", b"application/vnd.api+json"])
def test_json_under_any_content_type_is_checked(kind: bytes) -> None:
    body = BODY | {"n": 10**6}
    assert ask(admission(), body=body, headers=((b"content-type", kind),))[0] == 400


def test_a_duplicate_header_does_not_bypass_the_checks() -> None:
    """vLLM reads the first of two equal headers; admission read the last, so a second type or id passed unchecked."""
    app, wild = Taken(), BODY | {"n": 10**6}
    assert ask(admission(app), body=wild, headers=(*JSON, (b"content-type", b"text/plain")))[0] == 400
    ids = ((b"x-request-id", b"a\x1b[2J"), (b"x-request-id", b"a"))
    assert ask(admission(app), body=BODY, headers=(*JSON, *ids))[0] == 400
    assert not app.received


def test_a_large_body_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise /health would wait for it."""
    threads: list[Any] = []

    async def to_thread(function: Any, *args: Any) -> Any:
        threads.append(function)
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    for size in (10, LARGE):
        body = BODY | {"user": "x" * size}
        assert ask(admission(), body=body)[0] == 200
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("begins", "fails", "status"),
    [(False, KeyError("a"), 400), (True, KeyError("a"), KeyError), (False, OSError(), OSError)],
)
def test_only_a_failure_to_read_before_the_answer_is_the_clients(begins: bool, fails: Exception, status: Any) -> None:
    asked = admission(Taken(fails, begins))
    if isinstance(status, int):
        assert ask(asked, body=BODY)[0] == status
    else:
        with pytest.raises(status):
            ask(asked, body=BODY)


def test_an_id_in_the_header_is_printable() -> None:
    headers = (*JSON, (b"x-request-id", b"a\x1b[2J"))
    status, body = ask(admission(), body=BODY, headers=headers)
    assert (status, body["error"]["param"]) == (400, "X-Request-Id")


@pytest.mark.parametrize(("value", "status"), [(b"-5", 200), (b"high", 200), (b"9" * 30, 400), (b"2147483648", 400)])
def test_a_priority_in_the_header_has_the_bodys_limits(value: bytes, status: int) -> None:
    """vLLM 0.33 reads it, and ignores a value that is no number."""
    headers = (*JSON, (b"x-vllm-priority", value))
    found, body = ask(admission(), body=BODY, headers=headers)
    assert found == status
    assert status == 200 or body["error"]["param"] == "X-Vllm-Priority"


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/sleep", b"level=foo", "level"),
        ("/sleep", b"level=1&mode=", "mode"),
        ("/sleep", b"level=1&mode=wait&other=x", None),
        ("/sleep", b"", None),
        ("/reset_prefix_cache", b"device=moon", "device"),
        ("/wake_up", b"level=foo", None),
    ],
)
def test_an_operators_mistake_in_a_url_is_no_500(path: str, query: bytes, param: str | None) -> None:
    status, body = ask(admission(), path, headers=(), query_string=query)
    assert (status, body and body["error"]["param"]) == ((400, param) if param else (200, {}))


# (path, root_path, key sent, open metrics): let in?
KEY, OTHER = b"Bearer secret", b"Bearer secreT"
DOORS = [
    *((path, "", None, False, path in ("/health", "/ping")) for path in (
        "/health", "/ping", "/metrics", "/v1/models", CHAT, "/invocations", "/tokenize", "/version", "/docs",
        "/openapi.json", "/load", "/", "", "//health", "/health/", "/health/../v1/models", "/HEALTH", "/ping2",
    )),
    *((path, "", KEY, False, True) for path in (CHAT, "/metrics", "/health", "/invocations")),
    *((CHAT, "", sent, False, False) for sent in (
        OTHER, b"Bearer ", b"Bearer", b"secret", b"Basic secret", b"", b"Bearer secret ", b"Bearer \xff\xfe",
    )),
    (CHAT, "", b"bEARER secret", False, True),
    ("/metrics", "", None, True, True),
    ("/metrics/", "", None, True, True),
    ("/metrics/x", "", None, True, False),
    ("/api/health", "/api", None, False, True),
    ("/health", "/api", None, False, True),
    ("/api/v1/models", "/api", None, False, False),
    ("/apix/health", "/api", None, False, False),
    ("/health/v1/models", "/health", None, False, False),
]  # fmt: skip


@pytest.mark.parametrize(("path", "root", "sent", "metrics", "enters"), DOORS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_every_route_but_two_needs_the_key(path, root, sent, metrics, enters, method):
    app = Taken()
    # CVE-2026-48746: the client's Host header must have no effect
    headers = ((b"host", b"a/health?"),) + (((b"authorization", sent),) if sent is not None else ())
    status, body = ask(
        admission(app, ("another", "secret"), metrics), path, headers=headers, method=method, root_path=root
    )
    assert bool(app.scopes) is enters
    if not enters:
        assert (status, body["error"]["code"]) == (401, 401)
        assert b"secret" not in json.dumps(body).encode()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"authorization", KEY)] * 2, 401),
        ([(b"x-api-key", b"secret")], 200),
        ([(b"x-api-key", b"secret")] * 2, 401),
        ([(b"x-api-key", KEY)], 401),
        ([(b"x-api-key", b"secret"), (b"authorization", KEY)], 200),
        ([(b"x-api-key", b"secret"), (b"authorization", b"Bearer other")], 401),
        ([(b"x-api-key", b"other"), (b"authorization", KEY)], 401),
    ],
)
def test_each_header_with_a_key_has_one_of_this_server(headers: list[tuple[bytes, bytes]], status: int) -> None:
    assert ask(admission(keys=("secret",)), headers=tuple(headers))[0] == status


def test_a_refusal_is_not_counted() -> None:
    asked = admission(keys=("secret",))
    assert ask(asked)[0] == 401
    assert ask(asked, body=b"no json", headers=(*JSON, (b"authorization", b"Bearer secret")))[0] == 400
    assert asked.server.counted == [401, 400]


def test_without_keys_every_route_is_open() -> None:
    assert ask(admission(), "/v1/models", method="GET")[0] == 200


def test_a_websocket_needs_the_key_too() -> None:
    for headers, kind in (((), "websocket.close"), (((b"authorization", KEY),), "websocket.accept")):
        assert ask(admission(keys=("secret",)), "/v1/realtime", headers=headers, type="websocket") == (kind, {})


def test_missing_engine_is_not_said_by_health_and_before_a_request_is_read() -> None:
    app = admission()
    app.server.down = "the engine is being started anew"
    assert ask(app, "/health", method="GET")[0] == ask(app, "/ping")[0] == 503
    status, said = ask(app, body={"messages": []})
    assert (status, said["error"]["message"]) == (503, app.server.down)
    assert ask(app, "/metrics", method="GET")[0] == 200
    assert (app.server.waited, app.server.counted) == ([False, False, True], [503])


def test_client_does_not_learn_when_to_ask_again() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(answer(send, Refusal("Later.", status=HTTPStatus.SERVICE_UNAVAILABLE, retry_after=7)))
    assert (b"retry-after", b"7") in sent[0]["headers"]
