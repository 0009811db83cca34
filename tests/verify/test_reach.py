"""No program for NVIDIA GPUs, and no tile of the tables, is out of the reach of verify's calls.

Each program is a registered kernel; one that no call fits would be called right without having run. No GPU needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter

import pytest
import torch

pytest.importorskip("triton", reason="triton is missing: make setup")

from npu_gptoss.attention.triton import launch, launch_decode
from npu_gptoss.dense.triton import launch_hopper
from npu_gptoss.kernels import load_kernels, signature
from npu_gptoss.kernels.platform import SUPPORTED
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.moe.triton import tuned
from npu_gptoss.verify.calls import Call, CallSpec, Check, specs_of
from npu_gptoss.verify.checks import CHECKS
from tests.moe.cases import tiles_of

GPT_OSS = 2880
load_kernels()
FOR_CUDA = sorted(k.name for k in registry.kernels.values() if "cuda" in k.capability.platforms)


def check_of(name: str) -> Check:
    return CHECKS[f"{registry.kernels[name].family}.{registry.kernels[name].mode}"]


def calls_of(name: str) -> Iterator[tuple[CallSpec, Call]]:
    """The calls that `npu-gptoss verify --cases 0` gives a kernel on a Hopper."""
    kernel, check = registry.kernels[name], check_of(name)
    for spec in specs_of(kernel, check, 0, 0):
        for call in check.calls(spec):
            if not reasons_against(kernel, signature(**spec.roles), call.traits, SUPPORTED["cuda"]):
                yield spec, call


@pytest.mark.parametrize("name", FOR_CUDA)
def test_each_program_is_called(name: str) -> None:
    assert next(calls_of(name), None) is not None


@pytest.mark.parametrize("name", FOR_CUDA)
def test_each_mutation_shows_in_the_calls_of_each_program(name: str) -> None:
    """A program without the calls that show a mistake could make it and pass. The right answer passes."""
    check = check_of(name)
    for spec, calls in groupby(calls_of(name), key=itemgetter(0)):
        unseen = {mutation.name: mutation for mutation in check.mutations}
        made = set()
        for _, call in calls:
            answers = {name: mutation.answer(call.inputs, check.definition) for name, mutation in unseen.items()}
            answers = {name: wrong for name, wrong in answers.items() if wrong is not None}
            if not answers:  # and the definition is the slow part
                continue
            made |= answers.keys()
            want = check.definition(call.inputs)
            sizes = check.sizes(call.inputs) if check.sizes and spec.precision == "bfloat16" else None
            assert check.judge(want, want, spec.precision, sizes).ok, f"{spec}: the right answer is called wrong"
            for name, wrong in answers.items():
                if not check.judge(wrong, want, spec.precision, sizes).ok:
                    del unseen[name]
            if not unseen:
                break
        assert not made & unseen.keys(), f"{name} ({spec}): no call shows {sorted(made & unseen.keys())}"


def test_each_tile_of_the_experts_sees_gpt_oss_sizes_of_both_products() -> None:
    """So its loop over the inputs runs as often as in a server, in gate_up and in down."""
    by_hidden: set[object] = set()
    by_inner: set[object] = set()
    for name in (name for name in FOR_CUDA if name.startswith("moe.experts.")):
        for spec, call in calls_of(name):
            form, weights, ids = spec.roles["weight"], call.inputs["weights"], call.inputs["topk_ids"]
            read = form, tiles_of(name, form, len(ids), ids.numel(), weights.num_experts)
            by_hidden |= {read} if weights.hidden_size == GPT_OSS else set()
            by_inner |= {read} if weights.intermediate_size == GPT_OSS else set()
    in_triton = {(form, tuned.tiles(form, *point)) for form, points in tuned.POINTS.items() for point in points}
    in_gluon = {*map(tuned.few_gluon_tiles, tuned.FEW), *(tuned.gluon_tiles(pairs, 1) for pairs in tuned.GLUON)}
    wanted = in_triton | {("mxfp4", (tile,)) for tile in (tuned.one_gluon_tiles(), *in_gluon)}
    assert by_hidden >= wanted
    assert by_inner >= wanted


def test_each_ring_of_the_projections_goes_round() -> None:
    """More steps than it has places, or a tile that is written too early would not show."""
    reached = set()
    for name in ("qkv", "output"):
        for _, call in calls_of(f"dense.{name}.gluon"):
            x = call.inputs["residual" if name == "qkv" else "attended"]
            ring = launch_hopper._ring(name, len(x))
            if x.shape[1] > ring.inputs * ring.stages * ring.splits:
                reached.add((name, ring))
    assert reached == {
        (name, launch_hopper._ring(name, most)) for name in ("qkv", "output") for most in launch_hopper.TOKENS
    }


@pytest.mark.parametrize("name", ["gluon", "triton"])
def test_both_routers_are_called_with_gpt_oss_sizes(name: str) -> None:
    shapes = {tuple(call.inputs["weight"].shape) for _, call in calls_of(f"dense.router.{name}")}
    assert (32, GPT_OSS) in shapes


def test_prompts_and_decode_rows_of_attention_reach_each_configuration() -> None:
    tilings, configs, splits = set(), set(), set()
    for name in ("triton_decode", "triton_prefill"):
        for _, call in calls_of(f"attention.paged.{name}"):
            query, window, metadata = (call.inputs[name] for name in ("query", "sliding_window", "metadata"))
            kv_heads = call.inputs["key_cache"].shape[2]
            rows = [end - first for first, end in pairwise(metadata.query_start_loc)]
            single = [keys for keys, own in zip(metadata.seq_lens, rows, strict=True) if own == 1]
            if max(rows) > 1:
                tilings.add(launch.tiling_for(query.dtype, window))
            if single:
                config = launch_decode.decode_config(query.dtype, window is not None, len(single))
                configs.add(config)
                if window is None:
                    splits.add(launch_decode.splits_for(len(single), kv_heads, max(single), config))
    assert tilings == {launch.WIDE, *(launch.tiling_for(torch.bfloat16, window) for window in (None, 128))}
    wanted = ((False, 1), (True, 1), (True, launch_decode.MANY_ROWS))
    assert configs >= {launch_decode.decode_config(torch.bfloat16, *each) for each in wanted}
    assert {1, launch_decode.MOST_SPLITS} <= splits
