"""Selects the implementation of each operation for this machine, and explains the choice.

A *kernel* is a registered callable; a *solution* is its origin (ascend, triton, small_ops, reference, or a
plugin). `platform` detects the machine, `signature` describes calls, `registry` holds all kernels,
`selection` picks and explains, `profiling` shows the choice in a torch profile.
"""

from __future__ import annotations

from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.platform import (
    ASCEND,
    EMULATED_FP32,
    FP8_STORES,
    HOPPER,
    TRITON,
    TRITON_ASCEND,
    Capability,
    Platform,
    current_platform,
    platform_override,
)
from npu_gptoss.kernels.registry import (
    ANY,
    KernelSpec,
    Operation,
    Priority,
    Range,
    Where,
    define_operation,
    register_kernel,
)
from npu_gptoss.kernels.selection import (
    Bound,
    Described,
    KernelError,
    SelectedKernel,
    bind,
    chosen,
    explain,
    select_kernel,
    selected_kernels,
)
from npu_gptoss.kernels.signature import Signature, accepts, expect, signature
