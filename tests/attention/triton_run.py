"""The Triton attention kernels called where they can be: on a GPU, or in the interpreter as if on one; and mutated."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from npu_gptoss.attention import write_kv_cache
from npu_gptoss.kernels import Platform, platform_override
from tests.attention.cases import Step, check

Mutate = Callable[[pytest.MonkeyPatch, Path], None]
PLATFORM = Platform("cuda", frozenset({"triton"}))  # whose architecture is not known: no Gluon


def run_triton(step: Step, sliding_window: int | None, **changes: object) -> torch.Tensor:
    """By the public op, selection included."""
    with platform_override(PLATFORM):
        return step.run(sliding_window=sliding_window, **changes)


def check_windows(step: Step, windows: Iterable[int | None]) -> None:
    for sliding_window in windows:
        check(run_triton, step, sliding_window, rounded_weights=True)


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


def check_notices(
    mutate: Mutate | None, monkeypatch: pytest.MonkeyPatch, folder: Path, step: Step, windows: Iterable[int | None]
) -> None:
    """A passing check (None) must fail with a mistake in a kernel."""
    if mutate is None:
        check_windows(step, windows)
        return
    mutate(monkeypatch, folder)
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        check_windows(step, windows)


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


def _kernel(part: str, *changes: tuple[str, str]) -> Mutate:
    def mutate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from npu_gptoss.attention.triton import launch, launch_decode

        module = importlib.import_module(f"npu_gptoss.attention.triton.{'decode' if part == 'decode' else 'prefill'}")
        kernel = getattr(mutated(module, folder, *changes), f"{part}_kernel")
        monkeypatch.setattr(launch_decode if part == "decode" else launch, f"{part}_kernel", kernel)

    return mutate


def _hopper(*changes: tuple[str, str]) -> Mutate:
    def mutate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from npu_gptoss.attention.triton import hopper

        monkeypatch.setattr(hopper, "prefill_kernel", mutated(hopper, folder, *changes).prefill_kernel)

    return mutate


def _scale_without_log2_e(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from npu_gptoss.attention.triton import launch

    monkeypatch.setattr(launch, "LOG2_E", 1.0)


# What a kernel could get wrong, as a change of its text. The check has to notice each.
DECODE_MUTATIONS: dict[str, Mutate | None] = {
    "none": None,
    "sink dropped where shares are added up": _kernel(
        "decode", ("weight = tl.full([GROUP], 1.0, tl.float32)", "weight = tl.zeros([GROUP], tl.float32)")
    ),
    "sink dropped where one program sees all keys": _kernel(
        "decode", ("(weight * shrink + tl.exp2(sink - final))", "(weight * shrink)")
    ),
    "sink counted once per share": _kernel(
        "decode",
        ('largest = tl.full([ROWS], float("-inf"), tl.float32)', "largest = sink"),
        ("weight = tl.zeros([ROWS], tl.float32)", "weight = tl.full([ROWS], 1.0, tl.float32)"),
    ),
    "last share lost": _kernel("decode", ("real & (share < used)", "real & (share < used - 1)")),
    "last key lost": _kernel("decode", ("begin + share * BLOCK_N, length)", "begin + share * BLOCK_N, length - 1)")),
    "window 127": _kernel("decode", ("length - 1 - BEFORE", "length - BEFORE")),
    "window 129": _kernel("decode", ("length - 1 - BEFORE", "length - 2 - BEFORE")),
    "block table off by one": _kernel("decode", ("table + position // PAGE", "table + (position + 1) // PAGE")),
    "scale missing": _kernel("decode", ("softmax_step(scores, scale,", "softmax_step(scores, 1.4426950408889634,")),
    "scale without log2 e": _scale_without_log2_e,
    "head 0's queries for all": _kernel(
        "decode",
        ("query + row * query_row + (head * HEADS + member)", "query + row * query_row + (head * HEADS + 0 * member)"),
    ),
}
# The same where first keys are loaded before the newest is there; they show with `SETTLED_ROWS` raised.
SETTLED_MUTATIONS: dict[str, Mutate | None] = {
    "none": None,
    "newest key never read": _kernel("decode", ("newest[:, None], other=key", "older[:, None], other=key")),
    "newest value never read": _kernel("decode", ("newest[:, None], other=value", "older[:, None], other=value")),
    "newest key counted as the one before": _kernel("decode", ("(position == length - 1)", "(position == length - 2)")),
}
PROMPT_MUTATIONS: dict[str, Mutate | None] = {
    "none": None,
    "sink dropped": _kernel(
        "prefill", ("weight = tl.full([ROWS], 1.0, tl.float32)", "weight = tl.zeros([ROWS], tl.float32)")
    ),
    "sink counted twice": _kernel(
        "prefill", ("weight = tl.full([ROWS], 1.0, tl.float32)", "weight = tl.full([ROWS], 2.0, tl.float32)")
    ),
    "a row sees one key too many": _kernel("prefill", ("key_at[None, :] <= row_at", "key_at[None, :] <= 1 + row_at")),
    "a row does not see its own key": _kernel("prefill", ("key_at[None, :] <= row_at", "key_at[None, :] < row_at")),
    "no mask over a tile that needs one": _kernel(
        "prefill", ("clear = (lowest + 1) // BLOCK_N", "clear = (lowest + BLOCK_N) // BLOCK_N")
    ),
    "window 127": _kernel(
        "prefill", ("key_at[None, :] >= row_at[:, None] - BEFORE", "key_at[None, :] > row_at[:, None] - BEFORE")
    ),
    "window 129": _kernel(
        "prefill", ("key_at[None, :] >= row_at[:, None] - BEFORE", "key_at[None, :] >= row_at[:, None] - BEFORE - 1")
    ),
    "scale without log2 e": _scale_without_log2_e,
    "block table off by one": _kernel(
        "gather", ("request * table_stride + position // PAGE", "request * table_stride + (position + 1) // PAGE")
    ),
    "last key not gathered": _kernel("gather", ("real = at < length", "real = at < length - 1")),
}
HOPPER_MUTATIONS: dict[str, Mutate | None] = {
    "none": None,
    "sink dropped": _hopper(("weight = gl.full([ROWS], 1.0,", "weight = gl.full([ROWS], 0.0,")),
    "sink counted twice": _hopper(("weight = gl.full([ROWS], 1.0,", "weight = gl.full([ROWS], 2.0,")),
    "a row sees one key too many": _hopper(
        ("seen = key_at <= row_at[:, None]", "seen = key_at <= row_at[:, None] + 1")
    ),
    "a row does not see its own key": _hopper(("seen = key_at <= row_at[:, None]", "seen = key_at < row_at[:, None]")),
    "no mask over a tile that needs one": _hopper(
        ("steps - (lowest + 1) // BLOCK_N", "steps - (lowest + BLOCK_Q) // BLOCK_N")
    ),
    "keys of another tile": _hopper(("row = place + (steps - 1 - step)", "row = place + (steps - 2 - step)")),
    "rows of the first group for all": _hopper(("begin += NUMBER * (ROWS // GROUP)", "begin += 0 * (ROWS // GROUP)")),
    "sums not shrunk with a new largest score": _hopper(
        ("result = result * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]", "result = result * 1.0")
    ),
    "scale without log2 e": _scale_without_log2_e,
}
