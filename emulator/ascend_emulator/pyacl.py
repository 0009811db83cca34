"""The part of CANN's Python package `acl` that vllm-ascend imports. Other names raise."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType


def memcpy(target: int, room: int, source: int, count: int, kind: int) -> int:
    """acl.rt.memcpy: a synchronous copy; returns AscendCL's error code."""
    function = ctypes.CDLL("libascendcl.so").aclrtMemcpy
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function(target, room, source, count, kind)


def _missing(module: str) -> object:
    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{module}.{name} is not emulated: add it to emulator/ascend_emulator/pyacl.py")

    return __getattr__


def provide() -> None:
    """Makes `import acl` work in this process, unless CANN's own package is there."""
    if "acl" in sys.modules:
        return
    acl, rt = ModuleType("acl"), ModuleType("acl.rt")
    rt.memcpy = memcpy
    acl.rt = rt
    acl.__path__ = []
    acl.__getattr__, rt.__getattr__ = _missing("acl"), _missing("acl.rt")
    sys.modules.update({"acl": acl, "acl.rt": rt})
