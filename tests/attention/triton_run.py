"""The Triton attention kernels called where they can be: on a GPU, or in the interpreter as if on one; and mutated."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from npu_gptoss.attention import write_kv_cache
from npu_gptoss.kernels import Platform, platform_override
from tests.attention.cases import Step, check, in_one_tensor
from tests.tolerances import assert_close

PLATFORM = Platform("cuda", frozenset({"triton"}))  # whose architecture is not known: no Gluon


def run_triton(step: Step, sliding_window: int | None, **changes: object) -> torch.Tensor:
    """By the public op, selection included."""
    with platform_override(PLATFORM):
        return step.run(sliding_window=sliding_window, **changes)


def check_windows(step: Step, windows: Iterable[int | None]) -> None:
    for sliding_window in windows:
        check(run_triton, step, sliding_window, rounded_weights=True)


def check_fp8(step: Step, sliding_window: int | None) -> None:
    """A cache in FP8, keys and values in one tensor, gives what the same numbers in bfloat16 give.

    The numbers of every second head are the smallest that there are. On a GPU the two divide long requests otherwise,
    so that sums round apart.
    """
    sizes = torch.tensor([1.0, 2.0**-9], device=step.query.device).repeat(step.key_cache.shape[2] // 2)[:, None]
    narrow = [(cache * sizes).to(torch.float8_e4m3fn) for cache in (step.key_cache, step.value_cache)]
    got, want = (
        run_triton(dataclasses.replace(step, key_cache=keys, value_cache=values), sliding_window)
        for keys, values in (in_one_tensor(*narrow), (cache.to(torch.bfloat16) for cache in narrow))
    )
    if got.is_cuda:
        assert_close(got, want, got.dtype)
    else:
        assert torch.equal(got, want)


def check_written(step: Step) -> None:
    """New keys land in their slots and nowhere else, and none in a negative slot; four rows, the second without one."""
    heads, dim = step.key_cache.shape[2:]
    key, value = (torch.randn(6, heads, dim).to(step.key_cache) for _ in range(2))
    want = step.key_cache.clone(), step.value_cache.clone()
    step.metadata.slot_mapping[1] = -1
    kept = [0, 2, 3]
    for cache, new in zip(want, (key, value), strict=True):
        cache.view(-1, heads, dim)[step.metadata.slot_mapping[kept]] = new[kept]
    with platform_override(PLATFORM):
        write_kv_cache(key, value, step.key_cache, step.value_cache, step.metadata, kernel="triton")
    for cache, wanted in zip((step.key_cache, step.value_cache), want, strict=True):
        assert torch.equal(cache.nan_to_num(), wanted.nan_to_num())


def mutated(module: ModuleType, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """A copy of a module of kernels with pieces of its text replaced; each must be there exactly once."""
    text = Path(module.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {module.__name__}; mend the mutation"
        text = text.replace(old, new)
    name = f"mutated_{abs(hash((module.__name__, changes)))}"
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    spec.loader.exec_module(copy)
    return copy


# A kernel -> mistakes that its own structure invites, as changes of its text; `verify --mutate` has the formula's.
# "settled": of decode where first keys are loaded before the newest is there; they show with `SETTLED_ROWS` raised.
MUTATIONS: dict[str, dict[str, tuple[str, str]]] = {
    "decode": {
        "sink dropped where shares are added up": (
            "weight = tl.full([GROUP], 1.0, tl.float32)",
            "weight = tl.zeros([GROUP], tl.float32)",
        ),
        "sink dropped where one program sees all keys": (
            "(weight * shrink + tl.exp2(sink - final))",
            "(weight * shrink)",
        ),
        "last share lost": ("real & (share < used)", "real & (share < used - 1)"),
        "last key lost": ("begin + share * BLOCK_N, length)", "begin + share * BLOCK_N, length - 1)"),
        "window 129": ("length - 1 - BEFORE", "length - 2 - BEFORE"),
        "head 0's queries for all": ("query_row + (head * HEADS + member)", "query_row + (head * HEADS + 0 * member)"),
    },
    "settled": {
        "newest key never read": ("newest[:, None], other=key", "older[:, None], other=key"),
        "newest value never read": ("newest[:, None], other=value", "older[:, None], other=value"),
        "newest key counted as the one before": ("(position == length - 1)", "(position == length - 2)"),
    },
    "prefill": {
        "sink dropped": ("weight = tl.full([ROWS], 1.0, tl.float32)", "weight = tl.zeros([ROWS], tl.float32)"),
        "a row sees one key too many": ("key_at[None, :] <= row_at", "key_at[None, :] <= 1 + row_at"),
        "no mask over a tile that needs one": ("(lowest + 1) // BLOCK_N", "(lowest + BLOCK_N) // BLOCK_N"),
        "window 129": (">= row_at[:, None] - BEFORE", ">= row_at[:, None] - BEFORE - 1"),
    },
    "gather": {
        "block table off by one": ("table_stride + position // PAGE", "table_stride + (position + 1) // PAGE"),
        "last key lost": ("real = at < length", "real = at < length - 1"),
    },
    "hopper": {
        "sink dropped": ("weight = gl.full([ROWS], 1.0,", "weight = gl.full([ROWS], 0.0,"),
        "a row sees one key too many": ("seen = key_at <= row_at[:, None]", "seen = key_at <= row_at[:, None] + 1"),
        "no mask over a tile that needs one": (
            "steps - (lowest + 1) // BLOCK_N",
            "steps - (lowest + BLOCK_Q) // BLOCK_N",
        ),
        "keys of another tile": ("row = place + (steps - 1 - step)", "row = place + (steps - 2 - step)"),
        "rows of the first group for all": ("begin += NUMBER * (ROWS // GROUP)", "begin += 0 * (ROWS // GROUP)"),
        "sums not shrunk with a new largest score": (
            "result = result * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]",
            "result = result * 1.0",
        ),
    },
}
MISTAKES = [(kernel, mistake) for kernel in MUTATIONS for mistake in MUTATIONS[kernel]]


def check_notices(
    kernel: str, mistake: str, monkeypatch: pytest.MonkeyPatch, folder: Path, step: Step, windows: Iterable[int | None]
) -> None:
    """A passing check must fail with a mistake in a kernel."""
    from npu_gptoss.attention.triton import launch, launch_decode

    part = {"settled": "decode", "hopper": "prefill"}.get(kernel, kernel)
    file = "hopper" if kernel == "hopper" else "decode" if part == "decode" else "prefill"
    module = importlib.import_module(f"npu_gptoss.attention.triton.{file}")
    place = module if file == "hopper" else launch_decode if part == "decode" else launch
    check_windows(step, windows)
    wrong = mutated(module, folder, MUTATIONS[kernel][mistake])
    monkeypatch.setattr(place, f"{part}_kernel", getattr(wrong, f"{part}_kernel"))
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        check_windows(step, windows)
