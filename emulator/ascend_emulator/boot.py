"""Turns this process's torch_npu into an emulated Ascend 910B, right after torch_npu is imported.

The .pth file of the environment imports this module (`prepare.py`); import it nowhere else.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ascend_emulator import cards, pyacl, settings, triton_launches


def boot(_module: ModuleType | None = None) -> None:
    """Installs kernels, graphs and op contracts. Needs the stub libraries on LD_LIBRARY_PATH."""
    from ascend_emulator import context, defects, device, graphs, groups, memory, storage

    context.set_default(
        context.OpContext(
            cann=settings.text("CANN", "8.3.rc1"),
            card=settings.text("KIND", cards.DEFAULT.kind),
            strict=settings.is_on("STRICT", default=True),
            diagnostic_fp32=settings.is_on("FP32", default=False),
            tnd_max_workspace=settings.is_on("TND_WORKSPACE", default=False),
            defects=defects.checked(settings.names("DEFECTS")),
            is_device=memory.is_alias,
            format_of=storage.format_of,
            set_format=storage.set_format,
            is_whole=storage.is_whole,
            bytes_behind=memory.bytes_behind,
            group=groups.find,
        )
    )
    graphs.connect()
    memory.watch_frees()
    device.install()


def boot_custom_operators(_module: ModuleType) -> None:
    """Installs kernels for vllm-ascend's own operators, which exist once its extension module is loaded."""
    from ascend_emulator import device

    device.install(("_C_ascend",))


def boot_build(module: ModuleType) -> None:
    """Says that the wheel is built for the card, which vllm-ascend from 0.19 on compares: the package index has builds
    for the A2 only, and those for an A3 differ in operators that are not emulated. With 0.11.0 it changes nothing."""
    module.__device_type__ = settings.text("BUILD", cards.DEFAULT.kind)


def boot_triton_kernels(module: ModuleType) -> None:
    from ascend_emulator import triton_kernels

    triton_kernels.provide(module)


def boot_triton_driver(module: ModuleType) -> None:
    from ascend_emulator import triton_launches

    triton_launches.boot_driver(module)


def boot_triton_launches(module: ModuleType) -> None:
    from ascend_emulator import triton_launches

    triton_launches.boot_launches(module)


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "torch_npu": boot,
    "vllm_ascend._build_info": boot_build,
    "vllm_ascend.vllm_ascend_C": boot_custom_operators,
    "vllm.v1.worker.block_table": boot_triton_kernels,  # triton_kernels.KERNELS
    "triton.backends": boot_triton_driver,
    "triton.runtime.jit": boot_triton_launches,
}


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then a function."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], None]) -> None:
        self.loader, self.after = loader, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and hooks the modules of AFTER_IMPORT."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER_IMPORT:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, AFTER_IMPORT[name])
                return spec
        return None


def hook() -> None:
    """Entry point of the environment's .pth file on the emulated machine."""
    pyacl.provide()
    triton_launches.provide()
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
