"""The table of emulated operators: a kernel is a Python function under the exact schema of torch_npu 2.7.1.

`@kernel(schema)` checks the function's parameters against the schema (names, order, keyword-only, defaults), so a
schema copied from the wheel cannot drift from the code, and refuses operands that are not on the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from ascend_emulator.context import current
from ascend_emulator.rules import Call, ContractError, Layer

Kernel = Callable[..., Any]


class Traffic(NamedTuple):
    """Bytes that a call moves, and its number of kernels on the device."""

    read: int
    written: int
    launches: int = 1


OPS: dict[str, Kernel] = {}
SCHEMAS: dict[str, str] = {}

_EMPTY = inspect.Parameter.empty
_binders: dict[str, Callable[..., Arguments]] = {}


class Arguments(SimpleNamespace):
    """All arguments of one call under the schema's names, defaults filled in."""


def _rows(schema: torch._C.FunctionSchema) -> list[tuple[str, bool, Any]]:
    """(name, keyword only, default) of each argument."""
    rows = []
    for argument in schema.arguments:
        default = argument.default_value if argument.has_default_value() else _EMPTY
        rows.append((argument.name, argument.kwarg_only, tuple(default) if isinstance(default, list) else default))
    return rows


def _check_signature(function: Kernel, schema: torch._C.FunctionSchema) -> None:
    expected = _rows(schema)
    declared = [
        (p.name, p.kind is inspect.Parameter.KEYWORD_ONLY, p.default)
        for p in inspect.signature(function).parameters.values()
    ]
    if declared != expected:
        differing = [pair for pair in zip(declared, expected, strict=False) if pair[0] != pair[1]]
        raise TypeError(
            f"{function.__name__} has {len(declared)} parameters, {schema.name} {len(expected)}; first difference "
            f"(declared, schema): {differing[:1]}"
        )


def _binder(schema: torch._C.FunctionSchema) -> Callable[..., Arguments]:
    """Binds a call as the dispatcher would; raises Python's TypeError for unknown arguments."""
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY if k else inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default
        )
        for name, k, default in _rows(schema)
    ]
    signature = inspect.Signature(parameters)

    def bind(*args: Any, **kwargs: Any) -> Arguments:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Arguments(**bound.arguments)

    return bind


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


def _refuse_host_tensor(op: str, argument: str, tensor: torch.Tensor) -> None:
    text = (
        "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input tensor "
        f"device is correct: {argument} is on {tensor.device}, shape {tuple(tensor.shape)}."
    )
    raise ContractError(Call.of(op).text(Layer.BINDING, text, None))


def kernel(
    schema: str, *, host: Iterable[str] = (), bundle: bool = False, absent: Mapping[str, int] = MappingProxyType({})
) -> Callable[[Kernel], Kernel]:
    """Registers a kernel in OPS under the schema's name and overload.

    host: arguments that may be in host memory, or that the kernel checks itself.
    bundle: the function takes one `Arguments` instead of the schema's parameters (for very long schemas).
    absent: keywords that other versions have and this schema lacks -> the rule.
    """
    allowed_on_host = frozenset(host)
    parsed = torch._C.parse_schema(schema)
    name = parsed.name + (f".{parsed.overload_name}" if parsed.overload_name else "")
    short = name.split("::", 1)[1]
    names = tuple(argument.name for argument in parsed.arguments)
    bind = _binder(parsed)

    def register(function: Kernel) -> Kernel:
        if not bundle:
            _check_signature(function, parsed)

        @functools.wraps(function)
        def entry(*args: Any, **kwargs: Any) -> Any:
            for keyword in absent.keys() & kwargs.keys():
                text = f"Unknown keyword argument '{keyword}' for operator '{name}'. Schema: {schema}"
                Call.of(short).reject(absent[keyword], text, Layer.BINDING)
            on_device = current().is_device
            for argument, value in (*zip(names, args, strict=False), *kwargs.items()):
                if argument not in allowed_on_host:
                    for tensor in _tensors(value):
                        if not on_device(tensor):
                            _refuse_host_tensor(short, argument, tensor)
            return function(bind(*args, **kwargs)) if bundle else function(*args, **kwargs)

        OPS[name] = entry
        SCHEMAS[name] = schema
        _binders[name] = bind
        return entry

    return register


def _attribute(attribute: str, names: tuple[str, ...]) -> Callable[[Callable[[Arguments], Any]], Callable]:
    def register(function: Callable[[Arguments], Any]) -> Callable[[Arguments], Any]:
        for name in names:
            bind = _binders[name]
            setattr(OPS[name], attribute, lambda *args, bind=bind, **kwargs: function(bind(*args, **kwargs)))
        return function

    return register


def measured(*names: str) -> Callable[[Callable[[Arguments], Traffic]], Callable[[Arguments], Traffic]]:
    """Gives operators a `traffic(*args, **kwargs)`, called after a run, if their operands do not determine it."""
    return _attribute("traffic", names)


def shape(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def poisoned(size: Iterable[int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Unwritten memory: NaN, or for integers a value that is wrong everywhere."""
    dtype = dtype or like.dtype
    if dtype.is_floating_point:
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=like.device)
    value = torch.iinfo(dtype).min if dtype != torch.bool else True
    return torch.full(tuple(size), value, dtype=dtype, device=like.device)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min)
