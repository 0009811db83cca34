"""Freed memory of a process goes back to the system, unless its user has chosen how."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Blocks of growing size raise glibc's limit, then tensors lie between small blocks that stay.
GAPS = """
import ctypes, os, resource
from npu_gptoss.serving import heap
print(heap.bound())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def block(size):
    place = libc.malloc(size)
    libc.memset(place, 1, size)
    return place
libc.free(block(31 << 20))
large = []
for _ in range(40):
    large.append(block(4 << 20))
    block(1 << 10)  # stays
for place in large:
    libc.free(place)
pages = int(open("/proc/self/statm").read().split()[1])
print(pages * resource.getpagesize() >> 20)
"""


def run(**variables: str) -> tuple[str, int]:
    """What `bound` said, and the MiB that are left of 160 which were freed."""
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "LD_PRELOAD", "GLIBC"))
    }
    out = subprocess.run(
        [sys.executable, "-c", GAPS], env={**plain, **variables}, capture_output=True, text=True, check=True
    )
    said, left = out.stdout.split()
    return said, int(left)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_tensors_do_not_stay_between_small_blocks() -> None:
    said, left = run()
    _, stock = run(MALLOC_MMAP_THRESHOLD_=str(32 << 20))
    assert said == "True"
    assert left < 100 < stock


def test_a_users_own_limit_stays() -> None:
    assert run(MALLOC_MMAP_THRESHOLD_="4194304")[0] == "False"
