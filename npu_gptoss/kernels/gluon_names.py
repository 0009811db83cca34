"""The names of Gluon in Triton 3.9, in the releases before it too, and what kernels of several families need.

Importing this module imports triton.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# all threads of the program, or of the group of warps that has a program of its own
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# (descriptor, coordinates, mbarrier, shared memory): a tile by the tensor memory accelerator
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (shared memory, pointers): by the threads themselves
load_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# (shared memory, dtype, shape, layout): the same bytes
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers in shared memory, each of COUNT arrivals; they are ready after a `barrier`."""
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for each in gl.static_range(N):
        mbarrier.init(made.index(each), count=COUNT)
    return made


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describes a contiguous bfloat16 matrix in tiles of `rows` by `columns`, as products want them in memory."""
    block = [rows, columns]
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))
