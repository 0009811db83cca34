"""Kernels of the emulated device: they replace every PrivateUse1 kernel of torch_npu that would launch something.

Tensors keep torch_npu's allocation, views and metadata. `aten` operators run the CPU kernel on aliases of the operands;
operators of torch_npu, ATB and vllm-ascend run the emulator's table, and operators that it lacks raise.
Operands on different devices are refused with torch's exceptions. Exceptions are zero-dimensional host scalars, and
host index tensors of indexing (copied to the device first, so not during capture).

Not emulated: numerical differences of the real kernels (accumulation order, fast modes), their internal formats, types
that a real kernel refuses and the CPU's accepts, and speed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ascend_emulator import graphs, memory, native
from ascend_emulator.binding import check, library
from ascend_emulator.calls import Operation, convert, leaves
from ascend_emulator.ops import SCHEMAS, matmul_defects

NAMESPACES = ("aten", "npu", "atb", "_C_ascend")
# torch_npu's own kernels that only make views, metadata or pinned memory stay.
_VIEWS = """
    as_strided as_strided_ view _reshape_alias unfold view_as_real view_as_complex squeeze squeeze.dim
    squeeze.dims unsqueeze expand set_ set_.source_Storage set_.source_Tensor
    set_.source_Storage_storage_offset resize_ resize_as_ is_set_to is_pinned _pin_memory record_stream
    _to_copy to.device to.dtype to.other to.dtype_layout empty_with_format empty_with_format.names
    unsafe_empty_with_format empty_with_swapped_memory get_storage_size _copy_from_and_resize
"""
KEPT = frozenset(f"aten::{name}" for name in _VIEWS.split()) | frozenset(
    "npu::" + name for name in ["get_npu_format", "get_storage_size", "empty_with_format", "npu_change_data_ptr"]
)
# Operators whose result size, or whose Python value, depends on device memory.
_READS = """
    nonzero nonzero.out masked_select masked_select.out _unique2 _unique unique_dim unique_consecutive
    unique_dim_consecutive bincount equal is_nonzero argwhere
"""
HOST_READS = frozenset(f"aten::{name}" for name in _READS.split())
MATMULS = frozenset(f"aten::{name}" for name in ("mm", "mm.out", "addmm", "addmm.out", "linear"))
INDEXING = ("aten::index", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")


def _is_python(name: str) -> bool:
    """True if torch_npu wrote the kernel in Python: it calls other operators, and launches nothing itself."""
    return f"{name.replace('::', '/')}/PrivateUse1" in torch.library._impls


def _operations(namespaces: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace in namespaces and name not in KEPT and "weak_ref" not in name:
            try:
                yield name, getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
            except AttributeError:  # registered without a schema of that name
                continue


def _written_arguments(schema: torch._C.FunctionSchema) -> frozenset[str | int]:
    found: set[str | int] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= {argument.name} if argument.kwarg_only else {argument.name, position}
    return frozenset(found)


def _workspace_arguments(schema: torch._C.FunctionSchema) -> frozenset[str | int]:
    found = [(i, a) for i, a in enumerate(schema.arguments) if a.name == "workspace"]
    return frozenset(key for i, a in found for key in ((a.name,) if a.kwarg_only else (a.name, i)))


def _refuse_mixed(name: str, host: torch.Tensor, device: torch.device) -> None:
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {device} and {host.device}! "
        f"(when checking the arguments of {name}: a {host.device} tensor of size {list(host.size())})\n"
        "[ERROR] ERR01002 OPS invalid type"
    )


def _indices_to_device(args: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    return (args[0], convert(args[1], lambda t: t if t.is_npu else t.to(device)), *args[2:])


class Kernel:
    """The dispatcher's kernel for one operator."""

    def __init__(self, operation: Operation, overload: Any) -> None:
        self.operation = operation
        self.schema = overload._schema
        self.base = operation.name.partition(".")[0].rstrip("_")
        self.random = torch.Tag.nondeterministic_seeded in overload.tags
        self.asks_only = self.base.endswith(("_get_workspace", "_get_max_workspace"))
        self.indexing = self.base in INDEXING

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device, host = None, None
        for tensor in leaves([*args, *kwargs.values()]):
            if tensor.is_npu:
                if device is None:
                    device = tensor.device
                elif tensor.device != device:
                    _refuse_mixed(self.operation.name, tensor, device)
            elif tensor.dim() and tensor.is_cpu:
                host = tensor
        if "device" in kwargs:
            wanted = kwargs["device"]
            if device is None and wanted is not None:
                device = torch.device("npu", torch.npu.current_device() if wanted.index is None else wanted.index)
            kwargs["device"] = torch.device("cpu")
        if device is None:
            device = torch.device("npu", torch.npu.current_device())
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if self.indexing:
            args = _indices_to_device(args, device)
        elif host is not None and not self.operation.ours:  # ours check their own host arguments
            _refuse_mixed(self.operation.name, host, device)
        if self.reads_on_host(args, kwargs):
            stream = memory.raw_stream(device.index)
            check(f"{self.operation.name}: aclrtSynchronizeStreamWithTimeout", library.aclrtSynchronizeStream(stream))
        if self.random:
            return self.draw(args, kwargs, device)
        if self.asks_only:
            return graphs.query(self.operation, args, kwargs, device)
        return graphs.launch(self.operation, args, kwargs, device)

    def reads_on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.base == "aten::repeat_interleave":
            return kwargs.get("output_size") is None and not self.operation.name.endswith("_int")
        if self.indexing:
            return any(index.dtype in (torch.bool, torch.uint8) for index in leaves(args[1]))
        return self.operation.name in HOST_READS

    def draw(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
        """Draws random numbers from a CPU generator that follows the seed and offset of the device's generator."""
        graphs.check_capturable(self.operation, memory.raw_stream(device.index), random=True)
        own = kwargs.get("generator") or torch.npu.default_generators[device.index]
        if any(argument.name == "generator" for argument in self.schema.arguments):
            generator = torch.Generator()
            generator.manual_seed((own.initial_seed() * 1000003 + own.get_offset()) % 2**63)
            kwargs["generator"] = generator
        result = graphs.launch(self.operation, args, kwargs, device)
        own.set_offset(own.get_offset() + 4)
        return result


def _not_emulated(name: str) -> Callable[..., Any]:
    operation = Operation(name, torch.empty, ours=True)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        graphs.check_capturable(operation, memory.raw_stream(torch.npu.current_device()))
        raise NotImplementedError(
            f"The emulated NPU has no kernel for {name}. It never guesses: add one to emulator/ascend_emulator/ops."
        )

    return kernel


def other_defaults(written: str, wheels: torch._C.FunctionSchema) -> dict[str, Any]:
    """Defaults of this wheel's schema that the kernel lacks or sets differently: torch passes no default on."""
    own = {argument.name: argument for argument in torch._C.parse_schema(written).arguments}
    return {
        argument.name: argument.default_value
        for argument in wheels.arguments
        if argument.kwarg_only
        and argument.has_default_value()
        and argument.name in own
        and own[argument.name].default_value != argument.default_value
    }


def with_defaults(function: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    if not defaults:
        return function

    @functools.wraps(function)
    def filled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**defaults, **kwargs})

    return filled


def kernel_for(name: str, overload: Any, table: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Makes the replacement for torch_npu's kernel of one operator."""
    if name in native.KERNELS:
        return native.KERNELS[name]
    if name in table:
        function, ours = table[name], True
    elif name.startswith("aten::"):
        function, ours = matmul_defects.spoilt(overload) if name in MATMULS else overload, False
    else:
        return _not_emulated(name)
    schema = overload._schema
    if ours and name in SCHEMAS:
        function = with_defaults(function, other_defaults(SCHEMAS[name], schema))
    operation = Operation(name, function, ours, _written_arguments(schema), _workspace_arguments(schema))
    kernel = Kernel(operation, overload)
    return lambda *args, **kwargs: kernel(*args, **kwargs)


_libraries: dict[str, torch.library.Library] = {}
_installed: set[str] = set()


def install(namespaces: tuple[str, ...] = NAMESPACES) -> int:
    """Replaces the kernels of all registered operators; returns how many. Later calls add later operators."""
    from ascend_emulator.ops import OPS

    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, overload in list(_operations(namespaces)):
            if name in _installed or _is_python(name):
                continue
            namespace = name.partition("::")[0]
            library_ = _libraries.setdefault(namespace, torch.library.Library(namespace, "IMPL"))
            library_.impl(overload, kernel_for(name, overload, OPS), "PrivateUse1")
            _installed.add(name)
            count += 1
    return count
