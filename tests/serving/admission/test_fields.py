"""Compares the table of fields with vLLM's own classes, and tests each rule."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest

from npu_gptoss.serving import releases
from npu_gptoss.serving.admission import body as bodies
from npu_gptoss.serving.admission import fields
from npu_gptoss.serving.admission.refusal import Refusal, escaped, shown
from tests.serving.admission.test_middleware import LIMITS
from tests.serving.conftest import found

# fields that need no limit; chats', responses' and messages' are in test_ledger.py
SWITCHES = {
    "stream", "logprobs", "echo", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "use_beam_search", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "return_tokens_as_token_ids", "return_token_ids", "return_token_strs",
    # of 0.33
    "watermarking", "return_weight_versions", "return_token_offsets", "return_prompt_text", "return_mm_kwargs",
    "early_stopping",
}  # fmt: skip
# enumerations, which pydantic checks, and text for the model, which its context limits
CHECKED = {"suffix", "user", "prompt", "truncation_side", "token_offsets", "guided_decoding_backend", "mm_payload",
           "reasoning_ended", "output_mode", "parse_context", "logits_processors"}  # fmt: skip

# the modules of each release that have request classes, and the route of each class
PROTOCOLS = (
    "openai.protocol",  # of 0.11
    *("openai.completion.protocol", "serve.tokenize.protocol", "serve.disagg.protocol"),
    "scale_out.token_in_token_out.protocol",  # of 0.33
)
CLASSES = {
    "CompletionRequest": "/v1/completions",
    "TokenizeChatRequest": "/tokenize",
    "TokenizeCompletionRequest": "/tokenize",
    "DetokenizeRequest": "/detokenize",
    "GenerateRequest": "/inference/v1/generate",
}


@pytest.mark.serving
@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_vllm_has_a_limit_or_a_reason_against_it(name: str) -> None:
    pytest.importorskip("vllm")
    kind = found(name, *(f"vllm.entrypoints.{module}" for module in PROTOCOLS))
    if kind is None:
        assert (name, releases.here().name) == ("GenerateRequest", "0.11")
        return
    assert set(kind.model_fields) - set(fields.ROUTES[CLASSES[name]]) - SWITCHES - CHECKED == set()


# fields of SamplingParams: vLLM checks the first three against the model and the prompt; the others affect one answer
COMPARED = {"prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids"}
ITS_OWN = {"detokenize", "flat_logprobs", "output_kind", "output_text_buffer_length", "skip_clone"} | {
    "skip_reading_prefix_cache"
}


@pytest.mark.serving
def test_every_field_of_sampling_params_has_a_limit_or_a_reason() -> None:
    """/inference/v1/generate passes them on unchecked."""
    pytest.importorskip("vllm.entrypoints.scale_out", reason="needs vLLM 0.33")
    from vllm.sampling_params import SamplingParams

    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert names - set(fields.SAMPLING_PARAMS) - SWITCHES - COMPARED - ITS_OWN == set()


@pytest.mark.serving
def test_structured_outputs_have_no_field_without_a_limit() -> None:
    params = pytest.importorskip("vllm.sampling_params").StructuredOutputsParams
    names = {field.name for field in dataclasses.fields(params) if not field.name.startswith("_")}
    flags = {"json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"}
    assert names - flags == set(fields.STRUCTURED)


@pytest.mark.parametrize("route", [*fields.ROUTES, fields.INVOCATIONS])
@pytest.mark.parametrize("odd", [[None, None], {"a": 1}, 3, True], ids=repr)
def test_model_that_is_no_text_is_looked_up(route: str, odd: Any) -> None:
    """vLLM looked it up in a table, which lists cannot be, and answered 500."""
    with pytest.raises(Refusal, match="model: expected a string, got ") as refusal:
        fields.check(route, {"model": odd}, LIMITS)
    assert refusal.value.param == "model"
    fields.check(route, {"model": "a"}, LIMITS)


@pytest.mark.parametrize(("route", "extra"), [
    *((route, ("vllm_xargs",)) for route, table in fields.ROUTES.items() if "vllm_xargs" in table),
    ("/inference/v1/generate", ("sampling_params", "extra_args")),
])  # fmt: skip
@pytest.mark.parametrize("wild", ["x", 7, ["a"]], ids=repr)
def test_a_transfer_among_the_extra_fields_is_an_object_too(route: str, extra: tuple[str, ...], wild: Any) -> None:
    """vLLM 0.33 reads transfer parameters there, and answered 500 to other types."""
    for value, passes in ((wild, False), ({"do_remote_prefill": False}, True)):
        body: Any = {"kv_transfer_params": value, "session_id": "a"}
        for name in reversed(extra):
            body = {name: body}
        with (
            contextlib.nullcontext() if passes else pytest.raises(Refusal, match="kv_transfer_params: expected an obj")
        ):
            fields.check(route, body, LIMITS)


# typical requests of clients, on either route
SERVED: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 2}, {"temperature": "0.7"}, {"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1},
    {"top_k": 0}, {"top_k": 2**31 - 1}, {"min_p": 0}, {"min_p": 1}, {"repetition_penalty": 1.1}, {"seed": -1},
    {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"n": 128}, {"n": None}, {"stop": None}, {"stop": []}, {"stop": "\n"},
    {"stop": ["a"] * 16}, {"stop_token_ids": [0, 201_087]}, {"logit_bias": {"50256": -100, "0": 100}},
    {"logit_bias": {}}, {"max_tokens": 10**9}, {"max_tokens": 4, "min_tokens": 4}, {"prompt_logprobs": 0},
    {"prompt_logprobs": 20}, {"priority": -5}, {"allowed_token_ids": [200_018]}, {"cache_salt": "x" * 43},
    {"presence_penalty": -2}, {"frequency_penalty": 2}, {"stream": True, "stream_options": {"include_usage": True}},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}}, {"user": "x" * 10_000},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, {"unknown": [1]},
    {"vllm_xargs": {"a": 1, "b": "c"}}, {"truncate_prompt_tokens": -1}, {"request_id": "abc-1"},
]  # fmt: skip


@pytest.mark.parametrize("extra", SERVED, ids=json.dumps)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/invocations"])
def test_values_within_the_limits_pass(extra: dict[str, Any], route: str) -> None:
    base = {"prompt": "a"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    fields.check(route, bodies.read(json.dumps(base | extra).encode()), LIMITS)


@pytest.mark.parametrize("prompt", ["a", ["a"] * 1024, [0, 201_087], [[1], [2, 3]], [1.0], "x" * 10**6])
def test_every_form_of_a_prompt_passes(prompt: Any) -> None:
    fields.check("/v1/completions", {"prompt": prompt}, LIMITS)


def test_a_number_of_nineteen_digits_in_a_text_is_no_number() -> None:
    raw = json.dumps({"prompt": "9" * 30, "n": 1}).encode()
    assert bodies.read(raw) == {"prompt": "9" * 30, "n": 1}


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert bodies.read(b'{"prompt": "\\ud83d\\ude00"}') == {"prompt": "\U0001f600"}


def test_a_hundred_levels_pass_and_one_more_does_not() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    bodies.read(nested(100))
    with pytest.raises(Refusal, match="at most 100 levels"):
        bodies.read(nested(101))


def test_a_shown_value_is_short_and_printable() -> None:
    values = ["\x1b[2J" * 9999, ["\r\n" * 9999] * 9999, {"a" * 9999: {"b": [[[[["\x00"]]]]]}}, 10**300, True, None]
    for value in values:
        assert len(shown(value)) <= 201
        assert shown(value).isprintable()
    assert escaped("a\nb\x1b[2J\ud800") == "a b\\x1b[2J\\ud800"


def test_a_request_is_checked_in_less_than_a_millisecond() -> None:
    """An ordinary body of 3 kB; the limit is 20 times the time of an idle machine."""
    messages = [{"role": "user", "content": "What is it? " * 20}] * 10
    raw = json.dumps({"model": "m", "messages": messages, "temperature": 0.7, "max_tokens": 100, "seed": 1}).encode()
    times = []
    for _ in range(50):
        since = time.perf_counter()
        fields.check("/v1/chat/completions", bodies.read(raw), LIMITS)
        times.append(time.perf_counter() - since)
    assert sorted(times)[10] < 1e-3, sorted(times)[10]


# fields with token ids; `sampling_params` contains more of them
TOKENS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("prompt", "items", "token_ids", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "label_token_ids"),
        lambda wild: [1, wild],
    ),
    "logit_bias": lambda wild: {"1": 1, str(wild): 1},
}
ENTRANCES = [
    *((route, (name,)) for route, table in fields.ROUTES.items() for name in TOKENS if name in table),
    *((fields.INVOCATIONS, (name,)) for name in TOKENS if name in fields.COMPLETION),
    *(("/inference/v1/generate", ("sampling_params", name)) for name in TOKENS if name in fields.SAMPLING),
]


@pytest.mark.parametrize("wild", [-1, 201_088, "201088", 201_088.0, 2**31, 2**64], ids=repr)
@pytest.mark.parametrize(
    ("route", "place"), ENTRANCES, ids=lambda value: value if isinstance(value, str) else value[-1]
)
def test_no_route_accepts_a_token_outside_the_vocabulary(route: str, place: tuple[str, ...], wild: Any) -> None:
    for token, passes in ((1, True), (wild, False)):
        value = TOKENS[place[-1]](token)
        for name in reversed(place):
            value = {name: value}
        with contextlib.nullcontext() if passes else pytest.raises(Refusal, match=place[-1]) as refusal:
            fields.check(route, {"prompt": "a"} | value, LIMITS)
    assert refusal.value.status == HTTPStatus.BAD_REQUEST
