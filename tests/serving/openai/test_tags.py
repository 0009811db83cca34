"""vLLM 0.33's frame around a structure, and the same as a grammar of llguidance's, take the same turns."""

from __future__ import annotations

import json
from types import SimpleNamespace as Having
from typing import Any

import pytest

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")

import llguidance
import llguidance.hf
import xgrammar

from npu_gptoss.frontend import chat
from npu_gptoss.serving.openai import tags
from npu_gptoss.serving.openai.release import Release_0_33
from tests.frontend.turns import WEATHER
from tests.harmony.conftest import tokenizer_files
from tests.serving.openai.cases import FORMAT

SIZE = 201_088
THOUGHT = "<|channel|>analysis<|message|>hm\n{}<|end|><|start|>assistant"
CALL, FINAL = "<|channel|>commentary to=functions.get_weather", "<|channel|>final json<|message|>"
STRICT = [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]
REQUESTS: dict[str, dict[str, Any]] = {
    "a format": {"response_format": FORMAT},
    "a call": {"tools": [WEATHER], "tool_choice": "required"},
    "one call": {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    "a strict tool": {"tools": STRICT},
    "a strict tool and a format": {"tools": STRICT, "response_format": FORMAT},
}
TURNS = [
    *(f"{before}{FINAL}{answer}" for before in ("", THOUGHT) for answer in ('{"a": 1}', '{"a": "x"}', "{}", "text")),
    *(
        f"{before}{CALL} json<|message|>{{{rest}"
        for before in ("", THOUGHT)
        for rest in ('"city": "Oslo"}', '"city": "Oslo", "town": "x"}')
    ),
    f'{CALL} <|constrain|>json<|message|>{{"city": "Oslo"}}',
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}',
    f'{CALL.replace("get_weather", "get_time")} json<|message|>{{"city": "Oslo"}}',
    *("<|channel|>final<|message|>text", "text", THOUGHT),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_files(tmp_path_factory.getbasetemp()))


def held(tokenizer: Any, backend: str, compact: bool = False, **fields: Any) -> Any:
    """Returns the engine's structure for a chat."""
    renderer = Having(renderer=Having(get_tokenizer=lambda: tokenizer), model_config=None)
    config = Having(structured_outputs_config=Having(backend=backend, disable_any_whitespace=compact))
    serving = Having(online_renderer=renderer, engine_client=Having(vllm_config=config))
    asked = chat.read({"messages": [{"role": "user", "content": "x"}], **fields}).asked
    params = Having(structured_outputs=None)
    Release_0_33().hold(serving, params, asked, asked.structure.fields)
    return params.structured_outputs


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Any:
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=SIZE))


@pytest.fixture(scope="module")
def reads(tokenizer: Any) -> Any:
    return llguidance.hf.from_tokenizer(tokenizer, SIZE)


@pytest.mark.parametrize("name", REQUESTS)
def test_both_grammars_take_the_same_turns(tokenizer: Any, compiler: Any, reads: Any, name: str) -> None:
    tag = held(tokenizer, "xgrammar", **REQUESTS[name]).structural_tag
    frame, lark = compiler.compile_structural_tag(tag), tags.as_lark(json.loads(tag))
    taken = {}
    for turn in TURNS:
        ids = tokenizer.encode(turn, add_special_tokens=False)
        matchers = xgrammar.GrammarMatcher(frame), llguidance.LLMatcher(reads, lark, log_level=0)
        assert not matchers[1].get_error()
        old = all(map(matchers[0].accept_token, ids)) and matchers[0].accept_token(tokenizer.eos_token_id)
        new = matchers[1].try_consume_tokens(ids) == len(ids) and matchers[1].is_accepting()
        assert old == new, turn
        taken[turn] = new
    assert 0 < sum(taken.values()) < len(TURNS)


@pytest.mark.parametrize("end", ["<|call|>", "<|end|>"])
def test_a_call_may_end_as_the_model_ends_it(tokenizer: Any, reads: Any, end: str) -> None:
    lark = tags.as_lark(json.loads(held(tokenizer, "xgrammar", **REQUESTS["a call"]).structural_tag))
    ids = tokenizer.encode(f'{CALL} json<|message|>{{"city": "Oslo"}}{end}', add_special_tokens=False)
    matcher = llguidance.LLMatcher(reads, lark, log_level=0)
    assert matcher.try_consume_tokens(ids) == len(ids)


def test_what_xgrammar_does_not_hold_goes_to_llguidance(tokenizer: Any) -> None:
    parts = {"allOf": [FORMAT["json_schema"]["schema"]] * 2}
    multiple = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5}}}
    many = [{"type": "function", "function": WEATHER["function"] | {"name": f"f{n}"}} for n in range(40)]
    for fields in (
        *({"structured_outputs": {"json": schema}} for schema in (parts, multiple)),
        {"structured_outputs": {"json": FORMAT["json_schema"]["schema"], "disable_any_whitespace": True}},
        {"tools": many, "tool_choice": "required"},
    ):
        assert held(tokenizer, "auto", **fields).grammar.startswith("%llguidance")
        assert held(tokenizer, "xgrammar", **fields).structural_tag
    odd = {"type": "object", "properties": {"properties": {"type": "string"}}}
    lark = held(tokenizer, "auto", structured_outputs={"json": odd, "disable_any_whitespace": True}).grammar
    assert '"properties": {"properties": {"type": "string"}}' in lark
    assert held(tokenizer, "auto", response_format=FORMAT).structural_tag
    assert held(tokenizer, "guidance", response_format=FORMAT).grammar


def test_white_space_that_a_server_switches_off_is_off_in_a_chat(tokenizer: Any, compiler: Any, reads: Any) -> None:
    tag = held(tokenizer, "xgrammar", True, response_format=FORMAT).structural_tag
    lark = held(tokenizer, "guidance", True, response_format=FORMAT).grammar
    for space, taken in (("", True), (" ", True), ("\n  ", False)):
        ids = tokenizer.encode(f'{FINAL}{{{space}"a":{space}1}}', add_special_tokens=False)
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
        assert all(map(matcher.accept_token, ids)) == taken
        matcher = llguidance.LLMatcher(reads, lark, log_level=0)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == (space == "")
