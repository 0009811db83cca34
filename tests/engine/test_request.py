"""Settings without meaning are refused when they are made; a request knows when it has ended."""

from __future__ import annotations

import math

import pytest

from npu_gptoss.engine.request import Request, SamplingParams
from tests.refused import refused


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": "x"}, "prompt_logprobs"),
    ],
)
def test_settings_without_meaning_are_refused_in_words(settings: dict[str, object], field: str) -> None:
    with refused(field):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("tokens", "max_length", "expected"),
    [
        ([5], 100, [None]),
        ([5, 6, 7], 100, [None, None, "length"]),
        ([9], 100, ["stop"]),
        ([5, 5], 4, [None, "length"]),
        ([5, 9], 4, [None, "stop"]),
    ],
)
def test_a_request_ends_at_a_stop_token_at_max_tokens_or_at_its_longest(tokens, max_length, expected) -> None:
    request = Request(
        prompt_length=2,
        token_ids=[9, 9],  # the stop token in the prompt ends nothing
        params=SamplingParams(max_tokens=3),
        seed=0,
        stop_token_ids=frozenset({9}),
        max_length=max_length,
    )
    reasons = []
    for token in tokens:
        request.append(token)
        reasons.append(request.finish_reason)
    assert reasons == expected


@pytest.mark.parametrize(
    ("generated", "max_tokens", "max_length", "expected"),
    [
        (0, 2, 100, True),
        (0, 1, 100, False),
        (1, 2, 100, False),  # the next token is the second of two
        (0, 9, 4, True),
        (1, 9, 4, False),  # the next token fills the context
        (2, 9, 4, False),  # it has ended
    ],
)
def test_no_step_is_launched_behind_a_requests_last_token(generated, max_tokens, max_length, expected) -> None:
    request = Request(2, [1, 1], SamplingParams(max_tokens=max_tokens), 0, frozenset(), max_length)
    for _ in range(generated):
        request.append(5)
    assert request.goes_on is expected


def test_a_request_that_stopped_early_does_not_go_on() -> None:
    request = Request(1, [1], SamplingParams(max_tokens=50), 0, frozenset({9}), max_length=100)
    request.append(9)
    assert not request.goes_on
