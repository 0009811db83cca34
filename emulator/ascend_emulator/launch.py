"""Finds the emulated environment, and sets the variables that make a process run on the emulated card.

Standard library only. Child processes inherit the variables, so servers that spawn workers need nothing else:
`LD_LIBRARY_PATH` finds the emulated CANN, and a .pth file boots the device layer when torch_npu is imported.
`prepare.py` makes both.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ascend_emulator import cards, defects, stacks
from ascend_emulator.errors import EmulatorError
from ascend_emulator.settings import PREFIX, VENV_VARIABLE
from ascend_emulator.stacks import CANN, CANN_VERSIONS, Stack

FOLDER = "ascend-emulator"  # in the environment: the libraries, and a folder like a CANN toolkit
TORCH_NPU = "lib/python3.*/site-packages/torch_npu"
MAX_DEVICES = 16
GIB = 1 << 30


class EmulationError(EmulatorError):
    """A command cannot run on the emulated machine."""


@dataclass(frozen=True)
class Machine:
    """The emulated machine. `memory`: GiB per device; poison makes each allocated byte real memory."""

    cann: str = "8.3.rc1"
    devices: int = 1
    memory: float = 4.0
    strict: bool = True
    diagnostic_fp32: bool = False
    trace: Path | None = None
    defects: tuple[str, ...] = ()  # names of emulator/defects.py
    triton: Path | None = None  # site-packages with Triton-Ascend and its compiler
    card: str = cards.DEFAULT.name

    @property
    def stack(self) -> Stack:
        return stacks.below(self.cann)

    def __post_init__(self) -> None:
        if self.cann not in CANN_VERSIONS:
            raise EmulationError(f"CANN {self.cann!r} is not emulated; choose one of {', '.join(CANN_VERSIONS)}.")
        if self.card not in cards.CARDS:
            raise EmulationError(f"card {self.card!r} is not emulated; choose one of {', '.join(cards.CARDS)}.")
        if not 1 <= self.devices <= MAX_DEVICES:
            raise EmulationError(f"{self.devices} devices cannot be emulated; choose 1 to {MAX_DEVICES}.")
        defects.checked(self.defects)
        if not self.memory > 0:
            raise EmulationError(f"{self.memory} GiB of device memory make no device; choose more than 0.")


def stack_of(venv: Path) -> Stack | None:
    """The stack of an environment, by its torch_npu; None without torch_npu."""
    for stack in stacks.STACKS:
        if any(venv.glob(f"{TORCH_NPU}-{stack.torch_npu}*.dist-info")):
            return stack
    there = (venv / FOLDER / "lib/manifest.json").is_file() or any(venv.glob(TORCH_NPU))
    return stacks.STACKS[0] if there else None


def find_venv(base: Mapping[str, str] = os.environ, stack: Stack | None = None) -> Path:
    """The environment with torch_npu: the named one, else the running one or `.venv-emulated` here or in the clone.

    stack: accept this stack only; next to a named environment, its sibling with the stack's suffix is found too.
    """
    named = base.get(VENV_VARIABLE, "")
    folder = f".venv-emulated{stack.suffix if stack else ''}"
    repository = Path(__file__).resolve().parents[2]
    candidates = [Path(named)] if named else [Path(sys.prefix), Path.cwd() / folder, repository / folder]
    if named and stack:
        candidates.append(Path(f"{named}{stack.suffix}"))
    for candidate in candidates:
        found = stack_of(candidate)
        if found is not None and stack in (None, found):
            return candidate.resolve()
    where = f"{VENV_VARIABLE}={named} has" if named else f"{sys.prefix} has"
    wanted = f"torch_npu {stack.torch_npu}" if stack else "torch_npu"
    raise EmulationError(
        f"{where} no {wanted}, and an emulated 910B runs torch-npu's own wheel. Install torch, torch-npu and "
        f"vllm-ascend as the emulator's README says; in a clone of npu-gptoss: "
        f"make setup-emulated{stack.suffix if stack else ''}"
    )


def toolkit(venv: Path, cann: str) -> Path:
    """Makes a folder with the layout of a CANN toolkit of this version, for programs that look for one."""
    root = venv / FOLDER / "cann" / cann
    for name in ("runtime", "compiler", "opp", f"{platform.machine()}-linux"):
        (root / name).mkdir(parents=True, exist_ok=True)
    info = root / f"{platform.machine()}-linux/ascend_toolkit_install.info"
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={CANN[cann]}\npath={root}\n")
    return root


def environment(machine: Machine, venv: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Adds to `base` the variables that make a process of `venv` run on `machine`."""
    library, cann = venv / FOLDER / "lib", toolkit(venv, machine.cann)
    # with TRITON_INTERPRET Triton's interpreter would run instead, and copy to the host
    dropped = ("PYTHONPATH", "PYTHONHOME", *(("TRITON_INTERPRET",) if machine.triton else ()))
    kept = {name: value for name, value in base.items() if name not in dropped}
    old_libraries = kept.get("LD_LIBRARY_PATH", "")
    return {
        # defaults that the user may override
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # An operator's workspace is host memory here. Blocks of many sizes below 32 MiB fragment glibc's heap, and a
        # server grows by gigabytes; from this size on each freed block goes back to the system.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        **kept,
        "VIRTUAL_ENV": str(venv),
        "PATH": f"{venv / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": f"{library}{os.pathsep}{old_libraries}" if old_libraries else str(library),
        "ASCEND_HOME_PATH": str(cann),
        "ASCEND_OPP_PATH": str(cann / "opp"),
        # torch is built for CUDA here: with an NVIDIA GPU the engine would look for CUDA, and end
        "CUDA_VISIBLE_DEVICES": "",
        # Kernels here bypass torch_npu's asynchronous queue, so they would overtake queued work.
        "TASK_QUEUE_ENABLE": "0",
        f"{PREFIX}_TASK_QUEUE": kept.get("TASK_QUEUE_ENABLE", ""),
        PREFIX: "1",
        **{f"{PREFIX}_{name}": value for name, value in cards.CARDS[machine.card].variables.items()},
        f"{PREFIX}_CANN": machine.cann,
        f"{PREFIX}_CANN_SAYS": CANN[machine.cann],
        f"{PREFIX}_DEVICES": str(machine.devices),
        f"{PREFIX}_MEMORY": str(int(machine.memory * GIB)),
        f"{PREFIX}_STRICT": "1" if machine.strict else "0",
        f"{PREFIX}_FP32": "1" if machine.diagnostic_fp32 else "0",
        f"{PREFIX}_DEFECTS": ",".join(machine.defects),
        f"{PREFIX}_TRITON": str(machine.triton or ""),
        f"{PREFIX}_TRACE": str(machine.trace.resolve()) if machine.trace else "",
    }
