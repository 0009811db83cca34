"""The names of Gluon in Triton 3.9, in the releases before it too. Importing this module imports triton."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# all threads of the program, or of the group of warps that has a program of its own
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# (descriptor, coordinates, mbarrier, shared memory): a tile by the tensor memory accelerator
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# (shared memory, pointers): by the threads themselves
load_elements = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# (shared memory, dtype, shape, layout): the same bytes
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
