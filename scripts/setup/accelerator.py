"""Print the place where `make serve` serves: `cuda` where an NVIDIA GPU can, else `cpu`; or the value of ON=.

It asks the driver's library, because torch is not installed yet; CUDA_VISIBLE_DEVICES counts. Where a GPU cannot serve,
stderr has the reason: the CPU serves then, and with ON=cuda nothing does. Standard library only, Python 3.8 or newer.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Any

PLACES = ("cpu", "cuda")
# of requirements/cuda.txt: torch's CUDA, NVIDIA's first driver with it, the first GPUs with bfloat16, the wheels
CUDA, DRIVER, CAPABILITY, MACHINE = (13, 0), "580", (8, 0), "x86_64"
NO_GPU = {34: "stub library", 100: "no device"}  # answers of cuInit, as cuda.h names them
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # attributes of a device, as cuda.h numbers them


class NoGpu(Exception):
    """The machine has no GPU; the text says how this was found."""


def gpu(load: Callable[[str], Any] = ctypes.CDLL, machine: str = platform.machine()) -> str:
    """Returns the reason why the first NVIDIA GPU cannot serve, empty when it can. Raises NoGpu."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        raise NoGpu("NVIDIA's driver library libcuda.so.1 is not there") from None
    status = cuda.cuInit(0)
    if status in NO_GPU:
        raise NoGpu(f"NVIDIA's driver library finds {NO_GPU[status]}")
    if status:
        return f"the driver does not start (cuInit returns {status}); see what `nvidia-smi` says"
    count, version, device, major, minor = (ctypes.c_int() for _ in range(5))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        raise NoGpu("the driver shows no GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    for value, attribute in ((major, CAPABILITY_MAJOR), (minor, CAPABILITY_MINOR)):
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    driver, capability = (version.value // 1000, version.value % 1000 // 10), (major.value, minor.value)
    if machine != MACHINE:
        return f"the packages are locked for {MACHINE}, and this machine is {machine}"
    if capability < CAPABILITY:
        return "it has compute capability {}.{}, and bfloat16 needs {}.{}".format(*capability, *CAPABILITY)
    if driver < CUDA:
        return "its driver is for CUDA {}.{}, expected {}.{}: install driver {} or newer".format(*driver, *CUDA, DRIVER)
    return ""


def choose(wanted: str, look: Callable[[], str] = gpu) -> tuple[str, str]:
    """wanted: ON. Returns one of PLACES, empty where none will do, and a sentence for the user."""
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
