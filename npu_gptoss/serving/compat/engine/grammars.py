"""Contains grammar errors in the engine core, and compiles each grammar with the backend that validated it.

vLLM 0.11.0 compiles a grammar in a thread and takes the result in `schedule()`, where a compile error ends the engine.
It keeps one backend per engine, the backend of the first structured request: a grammar validated by guidance after one
of xgrammar is compiled by xgrammar, which may refuse it or interpret it differently. 0.33 refuses it.

Here every grammar is wrapped: its exceptions are reported (`failed_requests.report`), and its row of the bit mask then
allows every token. Each backend gets a shallow copy of the manager, which creates the backend and compiles with it. The
engine's manager keeps the only bit mask, so all backends must use the same layout.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.engine.failed_requests import FAILED, PASSES, REFUSED, failures_of, report, words
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import GRAMMARS

_BACKENDS = "_npu_gptoss_backends"  # of a StructuredOutputManager: name -> its copy with that backend


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
    """A `StructuredOutputGrammar` that reports errors instead of raising them."""

    def __init__(self, grammar: Any, failures: deque[Any], request: Any) -> None:
        def method(name: str, *arguments: Any) -> Any:
            def asked() -> Any:
                return getattr(grammar, name)(*arguments)

            return _guarded(asked, failures, request, f"{FAILED}its grammar: ", lambda: INSTEAD[name](*arguments))

        vars(self).update({name: functools.partial(method, name) for name in INSTEAD})


@repair(
    "grammar-errors",
    f"{GRAMMARS}:StructuredOutputManager._async_create_grammar .should_fill_bitmask .should_advance",
    releases=("0.11",),
    upstream="vllm PR 47312",
    until="0.33",
)
def install_guard(module: ModuleType) -> None:
    """A grammar that does not compile, or raises later, ends the engine."""
    manager = module.StructuredOutputManager
    _guard(manager, manager.grammar_init, "_async_create_grammar")


@repair(
    "grammar-errors",
    f"{GRAMMARS}:StructuredOutputManager._create_grammar .should_fill_bitmask .should_advance",
    releases=("0.23",),
    upstream="vllm PR 47312",
    until="0.33",
)
def install_guard_0_23(module: ModuleType) -> None:
    """A grammar that does not compile, or raises later, ends the engine."""
    from npu_gptoss.serving.releases.vllm_0_23 import vllms_own

    manager = module.StructuredOutputManager
    _guard(manager, vllms_own(manager, "grammar_init"), "_create_grammar")


def _guard(manager: type, grammar_init: Any, compiling: str) -> None:
    """compiling: the method that returns a grammar; it runs in its own thread."""
    from vllm.v1.structured_output.request import StructuredOutputRequest

    for name in (compiling, "should_fill_bitmask", "should_advance"):
        expect_parameters(getattr(manager, name), "self", "request")
    expect_source(grammar_init, f"self.executor.submit(self.{compiling}, request)")
    expect_source(StructuredOutputRequest._check_grammar_completion, "self._grammar.result(timeout=0.0001)")

    @around(manager, compiling)
    def guarded(compile_grammar: Callable[..., Any], self: Any, request: Any) -> GuardedGrammar | None:
        """Returns None after an error. It is never ready: the scheduler passes the request over until it is ended."""
        failures = failures_of(self)

        def compiled() -> GuardedGrammar:
            return GuardedGrammar(compile_grammar(self, request), failures, request)

        return _guarded(compiled, failures, request, f"{REFUSED}its grammar does not compile: ", lambda: None)

    def asked(original: Callable[..., bool], self: Any, request: Any) -> bool:
        return _guarded(lambda: original(self, request), failures_of(self), request, FAILED, lambda: False)

    for name in ("should_fill_bitmask", "should_advance"):
        around(manager, name)(asked)


CHOOSES = "backend = request.sampling_params.structured_outputs._backend"
COMPILES = "self.backend.compile_grammar(request_type, grammar_spec)"


@repair(
    "grammar-backends",
    f"{GRAMMARS}:StructuredOutputManager.grammar_init .clear_backend",
    releases=("0.11",),
    upstream="vllm issue 43920",
    until="vLLM keeps a backend for each grammar",
)
def install_backends(module: ModuleType) -> None:
    """The first structured request chooses the backend of all later requests, even if another backend validated
    them."""
    manager = module.StructuredOutputManager
    _have_backends(manager, manager.grammar_init, "_async_create_grammar", CHOOSES, COMPILES)


@repair(
    "grammar-backends",
    f"{GRAMMARS}:StructuredOutputManager.grammar_init .clear_backend",
    releases=("0.23",),
    until="vLLM keeps a backend for each grammar",
)
def install_backends_0_23(module: ModuleType) -> None:
    """The first structured request chooses the backend of all later requests: vllm-ascend refuses a request that
    another backend validated until the server restarts."""
    from npu_gptoss.serving.releases.vllm_0_23 import vllms_own

    manager = module.StructuredOutputManager
    _have_backends(manager, vllms_own(manager, "grammar_init"), "_create_grammar", CHOOSES, COMPILES)


@repair(
    "grammar-backends",
    f"{GRAMMARS}:StructuredOutputManager.grammar_init .clear_backend",
    releases=("0.33",),
    until="vLLM keeps a backend for each grammar",
)
def install_backends_0_33(module: ModuleType) -> None:
    """The first structured request chooses the backend of all later requests: if xgrammar does not support its grammar,
    every other structured request is refused until the server restarts."""
    manager = module.StructuredOutputManager
    refuses = "if self.backend_name is not None and request_backend != self.backend_name: raise"
    _have_backends(manager, manager.grammar_init, "_create_grammar", refuses, "self.backend.compile_grammar(")


def _have_backends(manager: type, original_init: Any, compiling: str, choosing: str, compiles: str) -> None:
    """original_init: vLLM's own; compiling: as in `_guard`; choosing, compiles: source of these two that uses a
    request's backend."""
    expect_source(
        original_init, choosing, "if self.backend is None:", f"self.executor.submit(self.{compiling}, request)"
    )
    expect_source(getattr(manager, compiling), compiles)
    expect_source(manager.grammar_bitmask, "self.backend.allocate_token_bitmask(")
    original_clear = manager.clear_backend

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
            own.backend = own.backend_name = None
            _make_backend(original_init, own, request)
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


def _make_backend(original_init: Any, own: Any, request: Any) -> None:
    """Creates the backend that the request names with vLLM's own code, and compiles nothing yet."""
    held, own.executor = own.executor, _Nobody()
    try:
        original_init(own, request)
    finally:
        own.executor = held
        request.structured_output_request.grammar = None


class _Nobody:
    """An executor that does nothing."""

    def submit(self, *_: Any) -> None:
        return None


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
