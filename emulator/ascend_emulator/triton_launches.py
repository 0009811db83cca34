"""Triton-Ascend's kernels on the emulated device: Huawei's compiler checks them, this CPU runs the lowered code.

A launch is one kernel of the device in streams, graphs and traces, like any operator. If the compiler refuses it for
the card, the launch fails with the compiler's words. The packages have an environment of their own (`--triton`),
because they take the module name `triton`, and with that vLLM and vllm-ascend take other code paths.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ascend_emulator import cards, settings
from ascend_emulator.errors import EmulatorError

PACKAGES = ("triton", "ascendnpuir", "pybind11")


class Finder:
    """Finds these packages, and nothing else, in the other environment."""

    def __init__(self, packages: str) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PACKAGES:
            return None
        return importlib.machinery.PathFinder.find_spec(name, [self.packages])


def site_packages(environment: Path) -> Path:
    """The packages' folder. Raises EmulatorError if the environment has no Triton-Ascend."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    missing = [name for name in PACKAGES if not (packages / name).is_dir()]
    if missing:
        raise EmulatorError(
            f"{environment} has no {', '.join(missing)} for {version}; in a clone of npu-gptoss: "
            "make setup-ascend-compiler, then --triton .venv-ascend-compiler"
        )
    return packages


def provide() -> None:
    """Makes the compiler importable in each process of the machine, if it was requested."""
    packages = settings.text("TRITON")
    if packages:
        sys.meta_path.append(Finder(packages))
        programs = str(Path(packages) / "ascendnpuir/bin")  # triton looks for them when it is imported
        if programs not in os.environ["PATH"].split(os.pathsep):
            os.environ["PATH"] += f"{os.pathsep}{programs}"


def boot_driver(module: ModuleType) -> None:
    """Answers the driver's queries about the card. Triton loads the driver as a file, past the import system."""
    driver = module.backends["ascend"].driver
    utils = driver.__init__.__globals__["NPUUtils"]
    utils.__init__ = lambda self: None
    cubes = int(settings.text("CUBES", str(cards.DEFAULT.cubes)))
    utils.get_arch = lambda self: settings.text("SOC", cards.DEFAULT.soc)
    utils.get_aicore_num = lambda self: cubes
    utils.get_aivector_core_num = lambda self: 2 * cubes
    utils.get_device_properties = lambda self, device: {
        "max_shared_mem": 1,
        "num_aicore": cubes,
        "num_vectorcore": 2 * cubes,
    }
    driver.is_active = classmethod(lambda cls: True)


def boot_launches(module: ModuleType) -> None:
    from ascend_emulator.compiler import launches

    module.JITFunction.run = launches.run_by(_launch)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    from ascend_emulator import graphs
    from ascend_emulator.calls import leaves
    from ascend_emulator.compiler import launches

    constants, given, types = launches.parted(kernel, arguments)
    operation = _operation(kernel, tuple(types.items()), tuple(constants.items()))
    values = tuple(given.values())
    tensors = list(leaves(list(values)))
    device = next((tensor.device for tensor in tensors if tensor.is_npu), None)
    if device is None:
        raise EmulatorError(f"{kernel.__name__}: none of its tensors is on the device")
    storages = [tensor.untyped_storage() for tensor in tensors]
    owned = tuple((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages)
    graphs.launch(operation, (grid, owned, *values), {}, device)


@functools.cache
def _operation(kernel: Any, types: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...]) -> Any:
    """Compiles once for its types and constants. Raises CompilerError, as the first launch on a card would fail."""
    from ascend_emulator import context, trace
    from ascend_emulator.calls import Operation
    from ascend_emulator.compiler import host, lowering, planner, tools

    program = lowering.lower(kernel, dict(types), dict(constants))
    plan = planner.plan(program)
    if plan.refusal:
        raise tools.CompilerError(f"{program}: the compiler refuses it for an {lowering.target()}: {plan.refusal}")
    built = host.HostKernel(program, traced=trace.ENABLED)

    def run(grid: tuple[int, ...], owned: tuple[tuple[int, int], ...], *values: Any) -> None:
        if context.current().execute:
            built.on_addresses(grid, values)
            if trace.ENABLED:
                built.stay_inside(owned)

    if trace.ENABLED:
        run.traffic = lambda *_: trace.Traffic(*built.touched())
    return Operation(f"triton::{program.name}", run, ours=True, writes=frozenset(2 + i for i in program.written))
