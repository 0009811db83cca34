"""Structured output in the engine: errors of grammars, their backends, logits on a CPU, and where the answer begins.

vLLM 0.11.0 compiles a grammar in a thread and takes the result in `schedule()`, where a compile error ends the engine.
Here every grammar is wrapped: its exceptions are reported (`failed_requests.report`), and its row of the bit mask then
allows every token.

vLLM keeps one backend per engine, the backend of the first structured request: a grammar validated by guidance after
one of xgrammar is compiled by xgrammar, which may refuse it or interpret it differently; 0.33 refuses it. Here each
backend gets a shallow copy of the manager, which compiles with it. The engine's manager keeps
the only bit mask, so all backends must use the same layout.

The grammar restricts the answer, not the reasoning before it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.engine.failed_requests import FAILED, PASSES, REFUSED, failures_of, report, words
from npu_gptoss.serving.compat.engine.masks import tokens_of
from npu_gptoss.serving.compat.patch import Original, around, either, expect_source, repair, replace, vllms_own
from npu_gptoss.serving.compat.targets import ALL, RUNNER

if TYPE_CHECKING:
    import torch

_BACKENDS = "_npu_gptoss_backends"  # of a StructuredOutputManager: name -> its copy with that backend
MANAGER = "vllm.v1.structured_output:StructuredOutputManager"
BACKENDS = {
    "xgrammar": "XgrammarBackend",
    "guidance": "GuidanceBackend",
    "outlines": "OutlinesBackend",
    "lm-format-enforcer": "LMFormatEnforcerBackend",
}
COMPILING = "_async_create_grammar", "_create_grammar"  # returns a grammar; it runs in its own thread

# a grammar's methods, and the value that each returns after an error
INSTEAD: dict[str, Callable[..., Any]] = {
    "accept_tokens": lambda request_id, tokens: True,  # stock asserts it for drafts
    "validate_tokens": lambda tokens: [],
    "rollback": lambda num_tokens: None,
    "fill_bitmask": lambda bitmask, batch_index: bitmask[batch_index].fill_(-1),
    "is_terminated": lambda: False,
    "reset": lambda: None,
}


def _guarded(
    call: Callable[[], Any], failures: deque[Any], request: Any, what: str, otherwise: Callable[[], Any]
) -> Any:
    """Returns `call()`; if it raises, reports the error and returns `otherwise()`."""
    try:
        return call()
    except PASSES:
        raise
    except BaseException as error:
        report(failures, request, what + words(error))
        return otherwise()


class GuardedGrammar:
    """A `StructuredOutputGrammar` that reports errors instead of raising them.

    The request has this grammar: if the grammar also had the request, both would stay in memory until Python's rare
    search for cycles, 2.9 KB each.
    """

    def __init__(self, grammar: Any, failures: deque[Any], request: Any) -> None:
        known = weakref.ref(request)

        def method(name: str, *arguments: Any) -> Any:
            def asked() -> Any:
                return getattr(grammar, name)(*arguments)

            return _guarded(asked, failures, known(), f"{FAILED}its grammar: ", lambda: INSTEAD[name](*arguments))

        vars(self).update({name: functools.partial(method, name) for name in INSTEAD})


@repair("grammar-errors", f"{MANAGER}.{COMPILING[0]}", upstream="vllm PR 47312", until="0.33")
@repair("grammar-errors", f"{MANAGER}.{COMPILING[1]}", releases="0.23", upstream="vllm PR 47312", until="0.33")
def install_guard(module: ModuleType) -> None:
    """A grammar that does not compile, or raises, ends the engine."""
    from vllm.v1.structured_output.request import StructuredOutputRequest

    manager = module.StructuredOutputManager
    compiling = either(manager, *COMPILING)
    expect_source(vllms_own(manager, "grammar_init"), f"self.executor.submit(self.{compiling}, request)")
    expect_source(StructuredOutputRequest._check_grammar_completion, "self._grammar.result(timeout=0.0001)")

    @around(manager, compiling)
    def guarded(compile_grammar: Original, self: Any, request: Any) -> GuardedGrammar | None:
        """Returns None after an error. It is never ready: the scheduler passes the request over until it is ended."""
        failures = failures_of(self)

        def compiled() -> GuardedGrammar:
            return GuardedGrammar(compile_grammar(self, request), failures, request)

        return _guarded(compiled, failures, request, f"{REFUSED}its grammar does not compile: ", lambda: None)


@repair(
    "grammar-backends",
    f"{MANAGER}.grammar_init .clear_backend",
    releases=ALL,
    upstream="vllm issue 43920",
    until="vLLM keeps a backend for each grammar",
)
def install_backends(module: ModuleType) -> None:
    """The first structured request chooses the backend of all later requests, even if another backend validated
    them."""
    manager = module.StructuredOutputManager
    original_init, original_clear = vllms_own(manager, "grammar_init"), manager.clear_backend
    compiling = either(manager, *COMPILING)
    expect_source(original_init, "structured_outputs._backend", "if self.backend is None:")
    expect_source(original_init, f"self.executor.submit(self.{compiling}, request)")
    expect_source(getattr(manager, compiling), "self.backend.compile_grammar(request_type, grammar_spec")
    expect_source(manager.grammar_bitmask, "self.backend.allocate_token_bitmask(")

    def grammar_init(self: Any, request: Any) -> None:
        sampling = request.sampling_params
        if request.structured_output_request is None or sampling is None or sampling.structured_outputs is None:
            return
        copies = vars(self).setdefault(_BACKENDS, {})
        name = sampling.structured_outputs._backend
        own = copies.get(name)
        if own is None:
            failures_of(self)  # created before the copy, so that both share it
            own = copy.copy(self)
            own.backend, own.backend_name = new_backend(name, self.vllm_config, self.tokenizer), name
            _expect_layout(self.backend, own.backend, name)
            copies[name] = own
            if self.backend is None:
                self.backend = own.backend
        original_init(own, request)

    def clear_backend(self: Any) -> None:
        others = [own.backend for own in vars(self).get(_BACKENDS, {}).values() if own.backend is not self.backend]
        original_clear(self)  # on 0.33 this waits for running compilations
        for backend in others:
            backend.destroy()

    replace(manager, "grammar_init", grammar_init)
    replace(manager, "clear_backend", clear_backend)


def new_backend(name: str, vllm_config: Any, tokenizer: Any) -> Any:
    """Creates a backend of vLLM's as the engine does."""
    if name not in BACKENDS:
        raise ValueError(f"Unsupported structured output backend: {name}")
    module = importlib.import_module(f"vllm.v1.structured_output.backend_{name.replace('-', '_')}")
    size = vllm_config.model_config.get_vocab_size()
    made = getattr(module, BACKENDS[name])(vllm_config, tokenizer=tokenizer, vocab_size=size)
    if name in ("xgrammar", "guidance"):
        tokens_of(tokenizer, size)  # now and not in the first request; a forked child shares it
    return made


def _expect_layout(first: Any, other: Any, name: str) -> None:
    """Raises ValueError if the bit masks of two backends differ in layout."""
    if first is None:
        return
    rows = [backend.allocate_token_bitmask(1) for backend in (first, other)]
    if rows[0].shape != rows[1].shape or rows[0].dtype != rows[1].dtype:
        raise ValueError(
            f"the bit masks of structured output backend {name} have {tuple(rows[1].shape)} {rows[1].dtype}, "
            f"those of the backend in use {tuple(rows[0].shape)} {rows[0].dtype}; an engine needs one layout"
        )


@repair("cpu-grammar-bitmask", f"{RUNNER}:apply_grammar_bitmask", upstream="vllm PR 32384", until="0.23")
def install_bitmask(module: ModuleType) -> None:
    """xgrammar's CPU kernel takes only float32 logits, so the first structured output in bfloat16 ends the engine."""
    import torch as torch_

    expect_source(module.apply_grammar_bitmask, "xgr.apply_token_bitmask_inplace(")

    @around(module, "apply_grammar_bitmask")
    def apply_grammar_bitmask(
        original: Original, scheduler_output: Any, input_batch: Any, logits: torch.Tensor, device: torch.device
    ) -> None:
        if logits.device.type != "cpu" or logits.dtype == torch_.float32:
            original(scheduler_output, input_batch, logits, device)
            return
        wide = logits.float()  # the mask only sets logits to minus infinity
        original(scheduler_output, input_batch, wide, device)
        logits.copy_(wide)


def answer_has_begun(token_ids: Sequence[int], header: Sequence[int]) -> bool:
    """Returns whether the last message in these tokens is an answer with a complete header.

    `header` holds the five tokens of `<|start|>assistant<|channel|>final<|message|>`.
    """
    start, assistant, channel, final, message = header
    header_end = None
    for i in range(len(token_ids) - 1, -1, -1):
        if token_ids[i] == message:
            header_end = i
        elif token_ids[i] == start:
            if header_end is None or token_ids[i + 1] != assistant:
                return False
            spelled = list(token_ids[i + 1 : header_end])
            return (channel, final) in pairwise(spelled)
    return True  # a plain text of /v1/completions, no conversation: all of it is the answer


REASONER = "vllm.reasoning.gptoss_reasoning_parser:GptOssReasoningParser"


@repair("reasoning-end", f"{REASONER}.is_reasoning_end", upstream="vllm PR 34454", until="0.23")
def install_reasoning_end(module: ModuleType) -> None:
    """vLLM takes an earlier answer in the conversation for the end of the reasoning and applies the structure from the
    first token on; it does not know the header `final <|constrain|>json`."""
    parser = module.GptOssReasoningParser
    expect_source(parser.is_reasoning_end, "end_token_ids = self.reasoning_end_token_ids")
    expect_source(parser.__init__, 'self.model_tokenizer.encode("<|start|>assistant<|channel|>final<|message|>")')

    @around(parser, "is_reasoning_end")
    def is_reasoning_end(_: Original, self: Any, input_ids: Sequence[int]) -> bool:
        return answer_has_begun(input_ids, self.reasoning_end_token_ids)
