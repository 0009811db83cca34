"""Structured output in the engine core: a grammar error ends its own request; each request has its own backend."""

from __future__ import annotations

import gc
import time
import types
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1 import structured_output
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from npu_gptoss.serving.compat.engine import failed_requests as barrier
from npu_gptoss.serving.compat.engine.grammars import GuardedGrammar
from tests.serving.compat.of_release import LINE, OLD

not_0_33 = pytest.mark.skipif(LINE == "0.33", reason="the repair is for vLLM 0.11 and 0.23")

VOCABULARY = 64


class Panic(BaseException):
    """Like pyo3's PanicException, which is no Exception."""


class Grammar:
    def __init__(self, backend: str, spec: str) -> None:
        self.backend, self.spec = backend, spec

    def is_terminated(self) -> bool:
        return False

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        if self.spec == "no mask":
            bitmask[index].fill_(0)
            raise Panic(self.spec)
        bitmask[index].fill_(5)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if self.spec == "no tokens":
            raise Panic(self.spec)
        return True


def backend_named(name: str, width: int = VOCABULARY // 32) -> Any:
    """A backend that takes some time per grammar, and refuses the grammar `not <name>`."""

    class Backend:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.destroyed = False

        def compile_grammar(self, kind: Any, spec: str, **_: Any) -> Grammar:
            time.sleep(0.01)
            if spec == f"not {name}":
                raise RuntimeError(f"{name} does not know this")
            return Grammar(name, spec)

        def allocate_token_bitmask(self, rows: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=torch.int32)

        def destroy(self) -> None:
            assert not self.destroyed, "xgrammar's raises the second time"
            self.destroyed = True

    return Backend


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> StructuredOutputManager:
    monkeypatch.setattr("vllm.v1.structured_output.backend_xgrammar.XgrammarBackend", backend_named("xgrammar"))
    monkeypatch.setattr(structured_output, "XgrammarBackend", backend_named("xgrammar"))
    monkeypatch.setattr("vllm.v1.structured_output.backend_guidance.GuidanceBackend", backend_named("guidance"))
    tokenizer = "init_tokenizer_from_configs" if OLD else "cached_tokenizer_from_config"
    plain = mock.Mock(added_tokens_decoder={}, eos_token_id=0)
    plain.get_vocab.return_value, plain.encode.return_value = {}, []
    monkeypatch.setattr(structured_output, tokenizer, lambda **_: plain)
    config = types.SimpleNamespace(
        scheduler_config=types.SimpleNamespace(max_num_seqs=4),
        model_config=types.SimpleNamespace(skip_tokenizer_init=False, get_vocab_size=lambda: VOCABULARY),
        structured_outputs_config=types.SimpleNamespace(
            reasoning_parser="", reasoning_parser_plugin="", enable_in_reasoning=False
        ),
        parallel_config=types.SimpleNamespace(distributed_executor_backend="mp"),
        speculative_config=None,
    )
    return StructuredOutputManager(config)


def a_request(name: str, spec: str | None, backend: str = "xgrammar") -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=spec))
    params.structured_outputs._backend = backend
    if OLD:
        return Request(name, [1], params, None, None, structured_output_request=StructuredOutputRequest(params))
    return Request(name, [1], params, None)


def compiled(manager: StructuredOutputManager, *requests: Request) -> list[Any]:
    """Returns the grammars after all compilations, as `schedule()` takes them: None if not ready."""
    for request in requests:
        manager.grammar_init(request)
    manager.executor.shutdown(wait=True)
    return [request.structured_output_request.grammar for request in requests]


def reported(manager: StructuredOutputManager) -> dict[str, str]:
    return {request.request_id: reason for request, reason in barrier.failures_of(manager)}


@not_0_33
@pytest.mark.parametrize(
    "spec",
    [
        "not xgrammar",
        pytest.param(
            None, marks=pytest.mark.skipif(not OLD, reason="in vLLM 0.23 this is a request without a grammar")
        ),
    ],
    ids=["a compile error", "no grammar at all"],
)
def test_compile_error_does_not_raise_in_the_scheduler(patched, manager, spec):
    with patched("grammar-errors"):
        bad, good = compiled(manager, a_request("bad", spec), a_request("good", "a"))
        assert bad is None
        assert good.is_terminated() is False
        assert list(reported(manager)) == ["bad"]
        assert reported(manager)["bad"].startswith(barrier.REFUSED + "its grammar")


@not_0_33
@pytest.mark.parametrize("spec", ["no mask", "no tokens"])
def test_grammar_that_raises_later_is_reported_and_allows_all_tokens(patched, manager, spec):
    def step() -> Any:
        mask = manager.grammar_bitmask({"bad": bad, "good": good}, {"bad": 0, "good": 1}, {})
        for request in (bad, good):
            request.structured_output_request.grammar.accept_tokens(request.request_id, [3])
        return mask

    bad, good = a_request("bad", spec), a_request("good", "a")
    with patched("grammar-errors"):
        compiled(manager, bad, good)
        mask = step()
        assert mask[1].tolist() == [5, 5]
        assert mask[0].tolist() == ([-1, -1] if spec == "no mask" else [5, 5])
        assert reported(manager) == {"bad": f"{barrier.FAILED}its grammar: Panic: {spec}"}


def test_each_request_is_compiled_by_the_backend_that_validated_it(patched, manager):
    asked = [("a", "xgrammar"), ("not xgrammar", "guidance"), ("b", "xgrammar"), ("c", "guidance")]
    with patched("grammar-backends"):
        grammars = compiled(manager, *(a_request(str(n), *each) for n, each in enumerate(asked)))
        assert [grammar.backend for grammar in grammars] == [backend for _, backend in asked]
        first = manager.backend
        made = [own.backend for own in vars(manager)["_npu_gptoss_backends"].values()]
        assert len(made) == 2
        assert first is made[0]
        manager.clear_backend()
        assert [backend.destroyed for backend in made] == [True, True]


@not_0_33
def test_both_repairs_report_an_error_of_the_second_backend(patched, manager):
    with patched("grammar-errors", "grammar-backends"):
        good, bad = compiled(manager, a_request("good", "a"), a_request("bad", "not guidance", "guidance"))
        assert isinstance(good, GuardedGrammar)
        assert bad is None
        assert list(reported(manager)) == ["bad"]


@not_0_33
def test_a_finished_request_leaves_memory_at_once(patched, manager):
    with patched("grammar-errors"):
        request = a_request("one", "a")
        compiled(manager, request)
        known = weakref.ref(request)
        gc.disable()
        try:
            del request
            assert known() is None
        finally:
            gc.enable()


def test_backend_with_another_mask_layout_is_refused(patched, manager, monkeypatch):
    wide = backend_named("guidance", width=99)
    monkeypatch.setattr("vllm.v1.structured_output.backend_guidance.GuidanceBackend", wide)
    with patched("grammar-backends"):
        manager.grammar_init(a_request("first", "a"))
        with pytest.raises(ValueError, match=r"guidance have \(1, 99\)"):
            manager.grammar_init(a_request("second", "a", "guidance"))
        with pytest.raises(ValueError, match="Unsupported structured output backend: nonsense"):
            manager.grammar_init(a_request("third", "a", "nonsense"))
        manager.grammar_init(a_request("fourth", "a"))


def test_vllms_own_backends_use_one_mask_layout():
    """Required for two backends in one engine."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    masks = []
    for vocabulary in (VOCABULARY, 201088, 201089):
        guidance, xgrammar = object.__new__(GuidanceBackend), object.__new__(XgrammarBackend)
        guidance.ll_tokenizer = types.SimpleNamespace(vocab_size=vocabulary)
        xgrammar.vocab_size = vocabulary
        masks += [
            (backend.allocate_token_bitmask(2).shape, backend.allocate_token_bitmask(2).dtype)
            for backend in (guidance, xgrammar)
        ]
    assert masks[0::2] == masks[1::2]
