"""Checks that a model fits into this machine's memory, before the kernel ends the process.

A file may be sparse: 512 GB of zeros that take no place on a disk agree with a config.json as well as any weights do.
"""

from __future__ import annotations

import math
import resource
from dataclasses import replace
from pathlib import Path

import torch

from npu_gptoss.files import wrong
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import expected_tensors

_GIB = 1 << 30


def free_memory() -> int | None:
    """Bytes that this process could still get: of the machine with its swap, its control group and its own limit.

    None where the system does not say.
    """
    found = []
    try:
        lines = [line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines()]
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in lines}
        found.append(sizes["MemAvailable"] + sizes.get("SwapFree", 0))
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit.isdecimal():
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            kept = int((group / "memory.current").read_text()) - int(statistics.get("file", 0))  # caches are given back
            found.append(int(limit) - kept)
    except (OSError, KeyError, ValueError, IndexError):  # another system, or another version of control groups
        pass
    own = resource.getrlimit(resource.RLIMIT_AS)[0]
    if own != resource.RLIM_INFINITY:
        found.append(own)
    return max(0, min(found)) if found else None


def check_memory(config: GptOssConfig, dtype: torch.dtype, where: object) -> None:
    """Refuses weights that a CPU's memory cannot hold in `dtype`, in which MXFP4 experts are expanded there."""
    specs = expected_tensors(replace(config, quantization=None)).values()
    needed = sum(math.prod(spec.shape) for spec in specs) * dtype.itemsize
    free = free_memory()
    if free is not None and needed > free:
        said = f"expected {needed / _GIB:.1f} GiB of free memory for the weights on a CPU, got {free / _GIB:.1f} GiB."
        raise wrong(where, f"{said} Take a machine with more memory, or an accelerator.", "memory")
