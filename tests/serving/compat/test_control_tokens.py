"""Constrained text holds no control token of harmony, seven letters to xgrammar, and no endless white space."""

from __future__ import annotations

import gc
import json
import types
import weakref
from typing import Any

import pytest
import torch
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from npu_gptoss.serving.compat.engine import masks
from npu_gptoss.serving.compat.engine.masks import MOST, allows
from tests.harmony.conftest import tokenizer_files

REPAIR = "control-tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CONTROL = {"<|end|>": 200007, "<|call|>": 200012, "<|channel|>": 200005, "<|start|>": 200006, "<|message|>": 200008}
RETURN = 200002
TAG = {
    "structures": [{"begin": "<|channel|>final<|message|>", "schema": SCHEMA, "end": "<|end|>"}],
    "triggers": ["<|channel|>"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_files(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> XgrammarBackend:
    """One for all tests: it reads 200 000 tokens, for seconds."""
    structures = types.SimpleNamespace(disable_any_whitespace=False)
    config = types.SimpleNamespace(structured_outputs_config=structures, speculative_config=None, model_config=None)
    return XgrammarBackend(config, tokenizer=tokenizer, vocab_size=201_088)


class Walk:
    """A grammar and the mask behind the tokens of some texts."""

    def __init__(self, backend: Any, tokenizer: Any, kind: str, spec: Any) -> None:
        self.grammar = backend.compile_grammar(StructuredOutputOptions[kind], spec)
        self.mask, self.tokenizer = backend.allocate_token_bitmask(2), tokenizer

    def behind(self, text: str) -> torch.Tensor:
        assert self.grammar.accept_tokens("r", self.tokenizer.encode(text, add_special_tokens=False))
        self.grammar.fill_bitmask(self.mask, 1)
        return self.mask[1]

    def control(self) -> set[str]:
        return {name for name, number in CONTROL.items() if allows(self.mask[1], number)}


@pytest.mark.parametrize(
    ("kind", "spec", "text", "rest"),
    [
        ("JSON", json.dumps(SCHEMA), '{"city":"Paris', '"}'),
        ("JSON_OBJECT", "", '{"a":"Paris', '"}'),
        ("REGEX", '"[^"]*"', '"Paris', '"'),
        ("GRAMMAR", 'root ::= "<" [^>]* ">"', "<Paris", ">"),
    ],
    ids=["json", "json_object", "regex", "grammar"],
)
def test_constrained_text_holds_no_control_token(patched, backend, tokenizer, kind, spec, text, rest):
    with patched(REPAIR):
        walk = Walk(backend, tokenizer, kind, spec)
    inside = walk.behind(text)
    assert not walk.control()
    assert allows(inside, tokenizer.encode("é", add_special_tokens=False)[0])
    assert allows(walk.behind(rest), RETURN)


def test_a_finished_grammar_leaves_memory_at_once(patched, backend):
    """A cycle would keep its matcher until Python looks for cycles, which an engine seldom does."""
    with patched(REPAIR, "white-space"):
        grammar = backend.compile_grammar(StructuredOutputOptions.JSON, json.dumps(SCHEMA))
    assert isinstance(grammar, StructuredOutputGrammar)  # 0.33 asks
    vllms = weakref.ref(grammar.grammar.grammar)
    gc.disable()
    try:
        del grammar
        assert vllms() is None
    finally:
        gc.enable()


def test_a_tag_keeps_the_control_tokens_of_its_frame_only(patched, backend, tokenizer):
    with patched(REPAIR):
        walk = Walk(backend, tokenizer, "STRUCTURAL_TAG", json.dumps(TAG))
    walk.behind("hm\n")
    assert "<|channel|>" in walk.control()
    walk.behind("<|channel|>final<|message|>" + '{"city":"Paris')
    assert not walk.control()
    assert allows(walk.behind('"}'), CONTROL["<|end|>"])


@pytest.mark.parametrize("schema", [SCHEMA, {"enum": ["<|x", "b"]}], ids=["usual", "with such letters itself"])
def test_the_letters_of_a_control_token_do_not_end_a_tag(patched, backend, tokenizer, schema):
    """`}`, `<`, `|`, `end`, `|`, `>` as ordinary tokens ended the JSON for xgrammar, and for no reader."""
    tag = TAG | {"structures": [TAG["structures"][0] | {"schema": schema}]}
    with patched(REPAIR):
        walk = Walk(backend, tokenizer, "STRUCTURAL_TAG", json.dumps(tag))
    own = schema is not SCHEMA
    before = walk.behind("<|channel|>final<|message|>" + ('"b' if own else '{"city":"a<|'))
    letters = [number for number in map(tokenizer.convert_tokens_to_ids, ("<", "}<", "<|")) if number is not None]
    if own:
        before = walk.behind('"')
        assert allows(before, letters[0])
        return
    assert allows(before, letters[0]), "within a string they are letters"
    closed = walk.behind('"}')
    assert not any(allows(closed, letter) for letter in letters)
    assert walk.control() == {"<|end|>"}


class Spaced(Walk):
    """A walk with runs of single tokens."""

    def run(self, text: str, count: int) -> torch.Tensor:
        assert self.grammar.accept_tokens("r", self.tokenizer.encode(text, add_special_tokens=False) * count)
        self.grammar.fill_bitmask(self.mask, 1)
        return self.mask[1]

    def spaces(self) -> list[bool]:
        single = (self.tokenizer.encode(text, add_special_tokens=False) for text in (" ", "\n"))
        return [allows(self.mask[1], number) for (number,) in single]


def test_white_space_between_the_tokens_of_json_ends(patched, backend, tokenizer):
    """A server whose model writes nothing else would end at max_tokens, with half of an object."""
    with patched("white-space"):
        walk = Spaced(backend, tokenizer, "JSON", json.dumps(SCHEMA))
    walk.behind("{")
    walk.run("\n", MOST - 1)
    assert walk.spaces() == [True, True]
    inside = walk.run(" ", 1)
    assert walk.spaces() == [False, False]
    assert allows(inside, tokenizer.encode('"', add_special_tokens=False)[0])
    walk.behind('"city":"')
    walk.run(" ", 2 * MOST)
    assert walk.spaces()[0], "a string may hold any number"


def test_white_space_of_llguidance_ends_too(patched, tokenizer):
    structures = types.SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    config = types.SimpleNamespace(structured_outputs_config=structures)
    with patched("white-space"):
        backend = GuidanceBackend(config, tokenizer=tokenizer, vocab_size=201_088)
        walk = Spaced(backend, tokenizer, "JSON", json.dumps(SCHEMA))
    walk.behind("{")
    walk.run("\n", MOST)
    walk.grammar.rollback(1)
    walk.run("\n", 0)
    assert walk.spaces() == [True, True]
    walk.run("\n", 1)
    assert walk.spaces() == [False, False]


def test_white_space_of_refused_drafts_does_not_count(patched, tokenizer, backend, monkeypatch):
    monkeypatch.setattr(backend, "num_speculative_tokens", 4)
    with patched("white-space"):
        walk = Spaced(backend, tokenizer, "JSON", json.dumps(SCHEMA))
    walk.behind("{")
    walk.run("\n", MOST)
    walk.grammar.rollback(2)
    walk.run("\n", 1)
    assert walk.spaces() == [True, True]


def test_white_space_that_the_grammar_refused_does_not_count(patched, backend, tokenizer):
    with patched("white-space"):
        walk = Spaced(backend, tokenizer, "JSON", json.dumps(SCHEMA))
    walk.behind("{")
    (space,), (letter,) = (tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "a"))
    assert not walk.grammar.accept_tokens("r", [letter, *[space] * MOST])
    walk.run("\n", 1)
    assert walk.spaces() == [True, True]


def test_free_text_before_a_tag_has_any_white_space(patched, backend, tokenizer):
    with patched("white-space"):
        walk = Spaced(backend, tokenizer, "STRUCTURAL_TAG", json.dumps(TAG))
    walk.run("\n", 2 * MOST)
    assert walk.spaces() == [True, True]
    walk.behind("<|channel|>final<|message|>{")
    walk.run("\n", MOST)
    assert walk.spaces() == [False, False]


def test_a_row_of_control_tokens_alone_keeps_one():
    """A row that allows nothing would give any token, and the grammar would end the request."""
    row = torch.tensor([1 << 2, 0], dtype=torch.int32)
    masks._restrict(row, masks.mask_without({2, 31, 32}, 2))
    assert [number for number in range(64) if masks.allows(row, number)] == [2]
    row.fill_(-1)
    masks._restrict(row, masks.mask_without({2, 31, 32}, 2))
    assert [number for number in range(64) if not masks.allows(row, number)] == [2, 31, 32]
