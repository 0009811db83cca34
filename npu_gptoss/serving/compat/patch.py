"""The record of a runtime repair of foreign code, and the tools that its installer uses.

An installer is a function `install(module)`, marked `@repair(…)` once for each group of releases with the same places,
that receives the foreign module right after its import. It checks that the code to change is the code it knows
(`expect_source`; `around` compares the parameters) and changes it (`around`, `replace`). `Mismatch` undoes all changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any


class Mismatch(Exception):
    """The foreign code differs from the code that a repair was written for; the message names the difference."""


Installer = Callable[[ModuleType], None]
Original = Callable[..., Any]  # the replaced function, the first argument of each function for `around`


@dataclass(frozen=True)
class Patch:
    """One repair of foreign code."""

    name: str  # as in NPU_GPTOSS_SKIP_PATCHES
    reason: str  # one sentence: the defect without it
    touches: tuple[str, ...]  # every name that it replaces, "module:attribute", copies in other modules included
    install: Installer  # gets the module of the first of them, right after its import
    releases: tuple[str, ...]  # the releases that it was written for (serving/releases)
    upstream: str  # where vLLM repaired it, or "none found"
    until: str  # the first release without the need, or the change in vLLM that ends it
    essential: bool  # without it gpt-oss would silently compute wrong results

    @property
    def module(self) -> str:
        return self.touches[0].partition(":")[0]

    @property
    def file(self) -> str:
        return f"{self.install.__module__.partition('.compat.')[2].replace('.', '/')}.py"


def repair(
    name: str, *touches: str, until: str, releases: str = "0.11", upstream: str = "none found", essential: bool = False
) -> Callable[[Installer], Installer]:
    """Enters an installer into the table, above the entries below it. The first paragraph of its docstring is the
    reason that users read.

    touches: "module module …:Class.name .name …", each in each of the modules; ".name" is of the class before.
    """
    places: list[str] = []
    for modules, names in (place.split(":") for place in touches):
        owner = ""
        for attribute in names.split():
            owner = owner if attribute.startswith(".") else attribute.rpartition(".")[0]
            path = owner + attribute if attribute.startswith(".") else attribute
            places += [f"{module}:{path}" for module in modules.split()]

    def note(install: Installer) -> Installer:
        reason = " ".join(inspect.getdoc(install).partition("\n\n")[0].split())
        entry = Patch(name, reason, tuple(places), install, tuple(releases.split()), upstream, until, essential)
        install.repairs = [entry, *getattr(install, "repairs", ())]
        return install

    return note


def repairs_of(module: ModuleType) -> list[Patch]:
    """Returns a module's repairs, in the order of the file."""
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    return [entry for value in own for entry in getattr(value, "repairs", ())]


def expect_parameters(function: Any, *names: str) -> None:
    """Raises Mismatch unless the function takes at least these parameters (a class stands for its constructor)."""
    found = tuple(inspect.signature(function).parameters)
    missing = [name for name in names if name not in found]
    if missing:
        raise Mismatch(
            f"{function.__module__}.{function.__qualname__} was expected to take {', '.join(missing)}, "
            f"it takes ({', '.join(found)})"
        )


def either(owner: Any, *names: str) -> str:
    """Returns the first of these names that the owner has: releases name one thing differently."""
    for name in names:
        if hasattr(owner, name):
            return name
    raise Mismatch(f"{owner.__name__} has none of {', '.join(names)}")


def stock(value: Any) -> Any:
    """Returns the foreign code's own object, below every repair."""
    while hasattr(value, "__npu_gptoss_replaces__"):
        value = value.__npu_gptoss_replaces__
    return value


# vllm-ascend 0.23, which is imported first, replaces these functions of vLLM and keeps the original under another name
_ASCEND_KEEPS = {
    "grammar_init": "_vllm_ascend_original_grammar_init",
    "_validate_structured_outputs": "_vllm_ascend_original_validate_structured_outputs",
}


def vllms_own(owner: type, name: str) -> Any:
    """Returns vLLM's own function, below every repair of ours and of vllm-ascend."""
    return stock(vars(owner).get(_ASCEND_KEEPS.get(name), vars(owner)[name]))


def expect_source(function: Any, *markers: str) -> None:
    """Raises Mismatch unless each marker occurs in the function's source (white space does not count).

    If another repair has replaced the function, the foreign original is read.
    """
    function = stock(function)
    try:
        source = "".join(inspect.getsource(function).split())
    except (OSError, TypeError) as error:
        raise Mismatch(f"the source of {function.__qualname__} cannot be read: {error}") from None
    for marker in markers:
        if "".join(marker.split()) not in source:
            raise Mismatch(
                f"{function.__module__}.{function.__qualname__} no longer contains {marker!r}; is it repaired already?"
            )


# of the installer that runs in this thread: owner, name and old value
_changes: ContextVar[list[tuple[Any, str, Any]]] = ContextVar("changes")


@contextlib.contextmanager
def all_or_nothing() -> Iterator[None]:
    """Undoes the changes of an installer that raises."""
    token = _changes.set([])
    try:
        yield
    except BaseException:
        for owner, name, old in reversed(_changes.get()):
            setattr(owner, name, old)
        raise
    finally:
        _changes.reset(token)


def replace(owner: Any, name: str, new: Any, copies: Sequence[str] = ()) -> Any:
    """Replaces `owner.name` by `new`, also in modules that copied the name with `from … import name`.

    Modules of `copies` that are imported later copy the new object. Returns the old object.
    """
    old = vars(owner)[name]
    new.__npu_gptoss_replaces__ = old
    copied = [sys.modules[copy] for copy in copies if copy in sys.modules]
    for place in (owner, *(module for module in copied if vars(module).get(name) is old)):
        _changes.get([]).append((place, name, old))
        setattr(place, name, new)
    return old


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def around(owner: Any, name: str, copies: Sequence[str] = ()) -> Callable[[Callable[..., Any]], None]:
    """Replaces `owner.name` by a function that gets the original as its first argument, before those of the call.

    The original of a class or static method is passed without its class. `copies` as in `replace`. Raises Mismatch
    unless the original takes the other arguments that the new function names.
    """
    found = vars(owner)[name]
    original = getattr(found, "__func__", found)

    def put(new: Callable[..., Any]) -> None:
        _, *named = inspect.signature(new).parameters.values()
        expect_parameters(original, *(each.name for each in named if each.kind not in _REST))

        @functools.wraps(original)
        def with_original(*args: Any, **kwargs: Any) -> Any:
            return new(original, *args, **kwargs)

        replace(owner, name, with_original if original is found else type(found)(with_original), copies)

    return put


class _ImportHook(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and calls back after the module has run."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    run = spec.loader.exec_module  # perhaps that of another hook
                    spec.loader.exec_module = functools.partial(self._execute, spec.loader, run)
                return spec
        return None

    def _execute(self, loader: importlib.abc.Loader, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        del loader.exec_module  # restores the loader's own method, for inspect, pickle and reload
        run(module)
        for call in self.waiting.pop(module.__name__, ()):
            call(module)


_hook = _ImportHook()


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Calls `call(module)` now if the module is imported, else right after its import. Imports nothing itself."""
    module = sys.modules.get(name)
    if module is not None:
        call(module)
        return
    _hook.waiting.setdefault(name, []).append(call)
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
