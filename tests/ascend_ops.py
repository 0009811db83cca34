"""A `torch_npu` made of the emulator's operators, to test the Ascend kernels with ordinary torch.

It has no device and no dispatcher: every CPU tensor counts as a device tensor, and torch_npu's names call the
contract-checked operators of `ascend_emulator.ops`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ascend_emulator.context import OpContext, current, use
from ascend_emulator.ops import OPS
from ascend_emulator.stacks import CANN

from npu_gptoss.kernels import platform_override
from npu_gptoss.kernels.platform import OPERATORS

# From CANN 8.5 on (torch-npu 2.7.1.post2).
SINCE_8_5 = ("npu_clipped_swiglu",)


class Packet:
    """An operator with its overloads as attributes; records its calls in the shared list."""

    def __init__(self, name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
        self._name, self._calls = name, calls
        self._overloads: dict[str, Callable[..., Any]] = {}

    def add(self, overload: str, function: Callable[..., Any]) -> None:
        name = self._name + (f".{overload}" if overload else "")

        def call(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, kwargs))
            return function(*args, **kwargs)

        self._overloads[overload] = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._overloads[""](*args, **kwargs)

    def __getattr__(self, overload: str) -> Callable[..., Any]:
        try:
            return self._overloads[overload]
        except KeyError:
            raise AttributeError(f"{self._name} has no overload {overload}") from None


@contextmanager
def ascend(
    cann: str = "8.3.rc1", *, later_wheel: bool = False, cann_says: str | None = None, **context: Any
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Selects and runs kernels as on a 910B with this CANN; yields the list of operator calls (name, keywords).

    later_wheel: torch-npu 2.7.1.post2 or later, for any CANN. cann_says: CANN's own version text.
    """
    calls: list[tuple[str, dict[str, Any]]] = []
    module = ModuleType("torch_npu")
    for full_name, function in OPS.items():
        name, _, overload = full_name.partition("::")[2].partition(".")
        if name in SINCE_8_5 and cann.startswith("8.3") and not later_wheel:
            continue
        if not hasattr(module, name):
            setattr(module, name, Packet(name, calls))
        getattr(module, name).add(overload, function)
    version = CANN[cann] if cann_says is None else cann_says
    module.npu = SimpleNamespace(utils=SimpleNamespace(get_cann_version=lambda: version))
    module.get_npu_format = lambda tensor: current().format_of(tensor)
    before = sys.modules.get("torch_npu")
    sys.modules["torch_npu"] = module
    try:
        features = frozenset({"torch_npu", *(OPERATORS if cann == "9.1" else ())})  # of the wheel of each line
        with platform_override("ascend", features), use(OpContext(cann=cann, **context)):
            yield calls
    finally:
        if before is None:
            del sys.modules["torch_npu"]
        else:
            sys.modules["torch_npu"] = before
