"""Prints where `make serve` serves: `cuda` where an NVIDIA GPU can, else `cpu`; or what ON= says.

The driver's library is asked, because torch is not there yet, and CUDA_VISIBLE_DEVICES counts. A GPU that cannot serve
is named on stderr with the reason: the CPU serves then, and with ON=cuda nothing does. Standard library only; any
Python 3.8 or newer.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Any

PLACES = ("cpu", "cuda")
CUDA = (13, 0)  # of torch in requirements/cuda.txt
DRIVER = "580"  # NVIDIA's first release with it
CAPABILITY = (8, 0)  # the first with bfloat16
MACHINE = "x86_64"  # for which requirements/cuda.txt has wheels

NO_GPU = {34: "stub library", 100: "no device"}  # cuInit's answers, as cuda.h names them
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # attributes of a device, as cuda.h numbers them


class NoGpu(Exception):
    """There is none, in words."""


def gpu(load: Callable[[str], Any] = ctypes.CDLL, machine: str = platform.machine()) -> str:
    """Why the first NVIDIA GPU cannot serve; nothing when it can. Raises NoGpu."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        raise NoGpu("NVIDIA's driver library libcuda.so.1 is not there") from None
    status = cuda.cuInit(0)
    count, version, device, major, minor = (ctypes.c_int() for _ in range(5))
    if status in NO_GPU:
        raise NoGpu(f"NVIDIA's driver library finds {NO_GPU[status]}")
    if status:
        return f"the driver does not start (cuInit returns {status}); see what `nvidia-smi` says"
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        raise NoGpu("the driver shows no GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
    driver, capability = (version.value // 1000, version.value % 1000 // 10), (major.value, minor.value)
    if machine != MACHINE:
        return f"the packages are locked for {MACHINE}, and this machine is {machine}"
    if capability < CAPABILITY:
        return f"it has compute capability {_dotted(capability)}, and bfloat16 needs {_dotted(CAPABILITY)}"
    if driver < CUDA:
        return f"its driver is for CUDA {_dotted(driver)}, expected {_dotted(CUDA)}: install driver {DRIVER} or newer"
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def choose(wanted: str, look: Callable[[], str] = gpu) -> tuple[str, str]:
    """wanted: ON. Returns (of PLACES, or nothing where none will do, what to tell the user)."""
    if wanted == "cpu":
        return "cpu", ""
    if wanted and wanted not in PLACES:
        return "", f"ON={wanted} is not known; expected {' or '.join(PLACES)}, or nothing to let the machine decide."
    try:
        objection = look()
    except NoGpu as reason:
        return ("", f"ON=cuda, but {reason}. ON=cpu serves on the CPU.") if wanted else ("cpu", "")
    if not objection:
        return "cuda", ""
    sentence = f"the NVIDIA GPU here cannot serve: {objection}."
    return ("", f"{sentence} ON=cpu serves on the CPU.") if wanted else ("cpu", f"{sentence} The CPU serves.")


def main(wanted: str) -> int:
    place, sentence = choose(wanted)
    if sentence:
        print(f"make serve: {sentence}", file=sys.stderr)
    if place:
        print(place)
    return 0 if place else 2


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))
