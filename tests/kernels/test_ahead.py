"""Programs are compiled on threads and nothing is launched, without a GPU: `python -m tests.kernels.test_ahead` is the
process that asks the compiler for a Hopper GPU's programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.markdown import ROOT

triton = pytest.importorskip("triton")


@pytest.mark.slow
def test_programs_are_compiled_side_by_side_and_not_launched(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_ahead"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "DISABLE_PTXAS_OPT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"programs": 3, "elsewhere": 3, "zeros": True, "refused": True, "mode": None}


@triton.jit
def fill(out, BLOCK: triton.language.constexpr):
    places = triton.language.arange(0, BLOCK)
    triton.language.store(out + places, places.to(out.dtype.element_ty))


@triton.jit
def wrong(out, BLOCK: triton.language.constexpr):
    triton.language.static_assert(BLOCK > 64)


def main() -> None:
    """A launch would need a driver, which `NoDriver` is not."""
    import threading

    from triton.compiler.errors import CompilationError
    from triton.runtime import _async_compile, driver

    from npu_gptoss.kernels.ahead import compile_ahead
    from tests.model.programs import NoDriver

    driver.set_active(NoDriver())
    torch.use_deterministic_algorithms(True)  # fills new memory with other numbers
    zeros, threads = [], []

    def work() -> None:
        for _ in range(2):
            for block in (16, 32, 64):
                out = torch.empty(block, dtype=torch.int64)
                zeros.append(not out.any() and not torch.empty_like(out).any() and not out.new_empty(2).any())
                fill[(1,)](out, BLOCK=block)

    make = triton.compiler.compiler.ASTSource.make_ir

    def noted(*args: object, **options: object) -> object:
        threads.append(threading.current_thread() is not threading.main_thread())
        return make(*args, **options)

    triton.compiler.compiler.ASTSource.make_ir = noted
    compile_ahead(work)
    programs = len(fill.device_caches[0][0])
    try:
        compile_ahead(lambda: wrong[(1,)](torch.empty(4), BLOCK=4))
    except CompilationError:
        refused = True
    else:
        refused = False
    found = {
        "programs": programs,
        "elsewhere": sum(threads) - refused,
        "zeros": all(zeros),
        "refused": refused,
        "mode": _async_compile.active_mode.get(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
