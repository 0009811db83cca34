"""Compiles Triton programs on all cores before anything runs. Importing this module imports triton.

Triton compiles a program when it is first launched, one after the other: a start of 20b waited a minute for that. Its
`AsyncCompileMode` compiles on threads, but for launches that do not run (`warmup`) alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from unittest.mock import patch

import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from npu_gptoss.kernels.triton_launch import INTERPRETED

MOST_THREADS = 32  # a compiler takes some 100 MB
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Zeros(TorchDispatchMode):
    """Memory that no kernel fills is zero: torch's operations may read indices from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket.__name__ in UNINITIALISED else found


def compile_ahead(work: Callable[[], None]) -> None:
    """Calls `work`, in which each launch of a Triton kernel only has its program compiled, and waits for all of them.
    An error of the compiler is raised. Triton's interpreter compiles nothing, and `work` is not called."""
    if INTERPRETED:
        return
    launch = JITFunction.run

    def compiled(kernel: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=True, **options)

    def on_threads() -> None:
        threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        with (
            ThreadPoolExecutor(threads) as pool,
            patch.object(JITFunction, "run", compiled),
            _Zeros(),
            triton.AsyncCompileMode(pool),
        ):
            work()

    copy_context().run(on_threads)  # Triton 3.6 leaves the mode on behind an error
