"""A Triton kernel that is launched as it was before needs none of Triton's look at its arguments.

Triton 3.6 takes some 20 us of Python a launch: it works out anew what it would compile the kernel for, and calls hooks
that nobody has set. vLLM 0.33's second runner launches six small kernels in a step of decode.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import expect_source, repair, replace

_RUNNER = "vllm.v1.worker.gpu"
INPUTS = ("_prepare_pos_seq_lens_kernel", "_combine_sampled_and_draft_tokens_kernel", "_post_update_kernel")
TABLES = ("_gather_block_tables_kernel", "_compute_slot_mappings_kernel")
DRAW = ("_gumbel_sample_kernel",)


class Remembered:
    """A kernel of Triton's, and what it compiled for the arguments that it has been launched with."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._known = kernel, {}
        self._compiled = type(kernel).__name__ == "JITFunction"  # else Triton interprets it, or is not here
        if self._compiled:
            import torch
            from triton import knobs
            from triton.runtime import driver

            self._hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            self._driver, self._tensor = driver, torch.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        if self._compiled and type(grid) is tuple:
            return functools.partial(self._launch, grid)
        return self._kernel[grid]

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        active, tensor = self._driver.active, self._tensor
        device = active.get_current_device()
        # all that Triton compiles a kernel for of a tensor, and of anything else the value
        kinds = [
            (each.dtype, each.data_ptr() % 16 == 0) if type(each) is tensor else each if type(each) is int else (each,)
            for each in args
        ]
        key = (device, *kinds, *options.items())
        known = self._known.get(key)
        enter, leave = self._hooks
        if known is None or enter.calls or leave.calls or self._kernel.pre_run_hooks:
            compiled = self._kernel.run(*args, grid=grid, warmup=False, **options)
            rest = [options.get(param.name, param.default) for param in self._kernel.params[len(args) :]]
            self._known[key] = compiled.result() if hasattr(compiled, "result") else compiled, rest
            return
        compiled, rest = known
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *rest)


def _install(module: ModuleType, names: tuple[str, ...]) -> None:
    kernels = {name: Remembered(vars(module)[name]) for name in names}
    if any(kernel._compiled for kernel in kernels.values()):
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.runtime.jit import JITFunction

        expect_source(
            JITFunction.run,
            "launch_metadata = kernel.launch_metadata(grid, stream, *bound_args.values())",
            "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
            "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())",
        )
        expect_source(CudaLauncher.__call__, "self.launch(gridX, gridY, gridZ, stream, function,")
    for name, kernel in kernels.items():
        replace(module, name, kernel)


@repair(
    "launch-inputs",
    f"{_RUNNER}.input_batch:{' '.join(INPUTS)}",
    lines=("0.33",),
    until="vLLM launches the same kernels at once",
)
def install_inputs(module: ModuleType) -> None:
    """Triton looks at the arguments of the kernels that make a step's inputs anew at every step."""
    _install(module, INPUTS)


@repair(
    "launch-tables",
    f"{_RUNNER}.block_table:{' '.join(TABLES)}",
    lines=("0.33",),
    until="vLLM launches the same kernels at once",
)
def install_tables(module: ModuleType) -> None:
    """As launch-inputs, of the kernels that gather a step's blocks."""
    _install(module, TABLES)


@repair(
    "launch-draw",
    f"{_RUNNER}.sample.gumbel:{' '.join(DRAW)}",
    lines=("0.33",),
    until="vLLM launches the same kernels at once",
)
def install_draw(module: ModuleType) -> None:
    """As launch-inputs, of the kernel that draws a step's tokens."""
    _install(module, DRAW)
