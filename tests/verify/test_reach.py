"""No program for NVIDIA GPUs, and no tile of the tables, is out of the reach of verify's calls.

A kernel that is registered once launches one of several programs, by the sizes of the call. One that no call reaches
would be called right without having run. Which one a call reaches is asked of the code that decides it: no GPU needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="triton is missing: make setup")

from npu_gptoss.attention.triton import launch_decode, launch_prompts
from npu_gptoss.dense.triton import launch_hopper
from npu_gptoss.kernels import load_kernels, platform_override, signature
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.moe import triton as moe_triton
from npu_gptoss.moe.triton import launches, tuned
from npu_gptoss.verify.calls import Call, CallSpec, specs_of
from npu_gptoss.verify.checks import CHECKS

GPT_OSS = 2880


@pytest.fixture(autouse=True)
def a_hopper_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (launch_prompts, launch_hopper, launches):
        monkeypatch.setattr(module, "has_hopper", lambda device: True)


def calls_of(name: str) -> Iterator[tuple[CallSpec, Call]]:
    """What `npu-gptoss verify --cases 0` calls a kernel with on an NVIDIA GPU."""
    load_kernels()
    kernel = registry.kernels[name]
    check = CHECKS[f"{kernel.family}.{kernel.mode}"]
    with platform_override("cuda", frozenset({"triton"})) as platform:
        for spec in specs_of(kernel, check, 0, 0):
            for call in check.calls(spec):
                if not reasons_against(kernel, signature(**spec.roles), call.traits, platform):
                    yield spec, call


@pytest.fixture
def tiles_of_experts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The tiles that each call of an experts' kernel chooses; nothing is computed."""
    chosen: list[object] = []
    only_last = SimpleNamespace(shares_of=lambda *arguments: chosen.append(arguments[-1]))
    for program in ("one_hopper", "few_hopper"):
        monkeypatch.setattr(moe_triton, program, only_last, raising=False)
    right = launches.tiles

    def tiles(weight_format: str, path: str, tokens: int) -> tuple[tuned.Tiles, tuned.Tiles]:
        both = right(weight_format, path, tokens)
        chosen.append((weight_format, both))
        return both

    monkeypatch.setattr(launches, "tiles", tiles)
    monkeypatch.setattr(launches, "_products_in_gluon", lambda *arguments: chosen.append(arguments[-1]))
    monkeypatch.setattr(launches, "sorted_slots", lambda ids, *_: (ids, ids))
    for computing in ("_launch", "_combined"):
        monkeypatch.setattr(launches, computing, lambda *_, **__: None)
    return chosen


def test_each_tile_of_the_experts_sees_gpt_oss_sizes_of_both_products(tiles_of_experts: list[object]) -> None:
    """So its loop over the inputs runs as often as in a server, in gate_up and in down."""
    reached: set[tuple[object, int, int]] = set()
    for name in ("one", "few", "many"):
        kernel = registry.kernels[f"moe.experts.triton_{name}"]
        for _, call in calls_of(kernel.name):
            arguments = {each: value for each, value in call.inputs.items() if each != "logits"}
            weights = arguments["weights"]
            prepared = kernel.prepare(weights, arguments["swiglu_limit"])
            kernel.function(**{**arguments, "weights": prepared})
            reached.add((tiles_of_experts.pop(), weights.hidden_size, weights.intermediate_size))
            assert not tiles_of_experts, "one program a call"
    in_triton = {
        (weight_format, (up, down))
        for weight_format, rows in tuned.TABLE.items()
        for path, most, up, down in rows
        # a Hopper has programs of its own for these, and a call takes them there
        if weight_format != "mxfp4" or (path, most) not in (("few", 1), ("few", 48), ("many", tuned.UNBOUNDED))
    }
    tiles = {tuned.ONE, *(each for _, each in tuned.FEW), *(each for _, each in tuned.GLUON), *in_triton}
    assert {tile for tile, hidden, _ in reached if hidden == GPT_OSS} >= tiles
    assert {tile for tile, _, inner in reached if inner == GPT_OSS} >= tiles


def test_each_ring_of_the_projections_goes_round() -> None:
    """More steps than it has places, or a tile that is written too early would not show."""
    reached = set()
    for name, table in (("qkv", launch_hopper.QKV), ("output", launch_hopper.LINEAR)):
        for _, call in calls_of(f"dense.{name}.triton"):
            x, weight = (call.inputs["residual" if name == "qkv" else "attended"], call.inputs["weight"])
            if not launch_hopper.takes(x, weight) or (name == "qkv" and call.traits["head_dim"] != 64):
                continue
            ring = launch_hopper._ring(table, len(x))
            if x.shape[1] > ring.inputs * ring.stages * ring.splits:
                reached.add((name, ring))
    want = {("qkv", ring) for _, ring in launch_hopper.QKV} | {("output", ring) for _, ring in launch_hopper.LINEAR}
    assert reached == want


def test_both_routers_are_called_with_gpt_oss_sizes() -> None:
    seen = {
        launch_hopper.routes(call.inputs["residual"], call.inputs["weight"])
        for _, call in calls_of("dense.router.triton")
        if call.inputs["weight"].shape == (32, GPT_OSS)
    }
    assert seen == {False, True}


def test_prompts_and_decode_rows_of_attention_reach_each_configuration() -> None:
    tilings, configs, splits = set(), set(), set()
    for _, call in calls_of("attention.paged.triton"):
        query, window, metadata = (call.inputs[name] for name in ("query", "sliding_window", "metadata"))
        kv_heads = call.inputs["key_cache"].shape[2]
        rows = [end - first for first, end in pairwise(metadata.query_start_loc)]
        single = [keys for keys, own in zip(metadata.seq_lens, rows, strict=True) if own == 1]
        if max(rows) > 1:
            tilings.add(launch_prompts.tiling_for(query, query.shape[1] // kv_heads, window))
        if single:
            config = launch_decode.decode_config(query.dtype, window is not None, len(single))
            configs.add(config)
            if window is None:
                splits.add(launch_decode.splits_for(len(single), kv_heads, max(single), config))
    assert tilings >= {launch_prompts.HOPPER, launch_prompts.WINDOW}
    assert configs >= {launch_decode.FULL, launch_decode.WINDOW, launch_decode.WINDOW_MANY}
    assert {1, launch_decode.MOST_SPLITS} <= splits
