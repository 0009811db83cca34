"""The experts' Gluon kernels for Hopper against the definition: edges of tiles, columns, groups and steps; mutations.
All need the GPU. New memory is NaN."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_gptoss.moe import Mxfp4Experts
from npu_gptoss.moe.triton import tuned
from tests.attention.triton_run import mutated
from tests.moe.test_triton import Call, check, make_call, make_experts, slices
from tests.triton import ON_HOPPER

pytestmark = ON_HOPPER

SIZES = ((32, 32), (96, 160), (256, 64), (288, 544), (2880, 1440), (2880, 2880), (6144, 3072))


@dataclasses.dataclass(frozen=True)
class Program:
    """One of the programs. chooser: the function in `launches` that gives its tile, one of `shapes`; kernels: of its
    module.

    uneven: hidden and intermediate size that fill neither tiles nor steps. groups: slots of each expert around every
    edge of a tile; one expert a token. tokens: of a call; published: of one with all experts of 120b.
    """

    name: str
    chooser: str
    shapes: dict[str, Any]
    kernels: tuple[str, ...]
    uneven: tuple[int, int]
    groups: tuple[int, ...]
    tokens: int
    published: int
    sizes: tuple[tuple[int, int], ...] = SIZES

    @property
    def module(self) -> Any:
        return importlib.import_module(f"npu_gptoss.moe.triton.{self.name}_hopper")

    def run(self, call: Call) -> torch.Tensor:
        return call.run(f"moe.experts.gluon_{self.name}")

    def check(self, call: Call) -> torch.Tensor:
        got = self.run(call)
        check(call, got)
        return got

    def grouped_call(self) -> Call:
        """Each expert has as many slots as its group says, in mixed order."""
        call = make_call(uneven(self), sum(self.groups), top_k=1)
        ids = torch.repeat_interleave(torch.arange(len(self.groups)), torch.tensor(self.groups))
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))
        call.topk_ids = ids[order][:, None].cuda()
        call.topk_weights = torch.rand(len(ids), 1, device="cuda") + 0.5
        return call


# "other": beside the shapes that are used lower tiles than the layout's, fewer slots, a loop that ends in its middle, a
# share without inputs
ONE = Program(
    "one",
    "one_gluon_tiles",
    {"used": tuned.one_gluon_tiles(), "other": tuned.OneTiles(warps=1, deep=3, down_deep=2, splits=3, registers=168)},
    ("gate_up", "down"),
    uneven=(1120, 800),
    groups=(1,) * 8,  # a single token: no groups
    tokens=1,
    published=1,
)
FEW = Program(
    "few",
    "few_gluon_tiles",
    {
        **{f"up_to_{most}": tuned.few_gluon_tiles(most) for most in tuned.FEW},
        "other": tuned.FewTiles(slots=2, rows=32, warps=1, deep=3, registers=168),
    },
    ("gate_up", "down"),
    uneven=(1120, 800),
    groups=(0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17),
    tokens=11,
    published=60,
)
MANY = Program(
    "many",
    "gluon_tiles",
    {name: tuned.gluon_tiles(pairs, 1) for name, pairs in zip(("wide", "tall"), tuned.GLUON, strict=True)},
    ("product",),
    uneven=(192, 256),  # an odd number of steps in one product and an even one in the other
    groups=(0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 300),
    tokens=700,
    published=5000,
    sizes=((192, 128), (320, 192), (2880, 2880)),
)
EACH = [pytest.param((p, shape), id=f"{p.name}_{name}") for p in (ONE, FEW, MANY) for name, shape in p.shapes.items()]
GROUPED = [each for each in EACH if not each.id.startswith("one")]
SMALL = [each for each in EACH if not each.id.startswith("many")]


@pytest.fixture(params=EACH)
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """With its tile for any number of tokens."""
    from npu_gptoss.moe.triton import launches

    program, shape = request.param
    monkeypatch.setattr(launches, program.chooser, lambda *sizes: shape)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield program
    torch.use_deterministic_algorithms(False)


@functools.cache
def _experts(experts: int, hidden: int, inner: int) -> Mxfp4Experts:
    return make_experts("mxfp4", experts=experts, hidden=hidden, inner=inner)


def uneven(program: Program) -> Mxfp4Experts:
    return _experts(len(program.groups), *program.uneven)


@pytest.mark.parametrize("program", GROUPED, indirect=True)
def test_groups_that_end_at_every_edge_of_a_tile(program):
    program.check(program.grouped_call())


def test_any_rows_and_inputs(program):
    for hidden, inner in program.sizes:
        program.check(make_call(make_experts("mxfp4", experts=8, hidden=hidden, inner=inner), program.tokens))


def test_the_published_shape_with_every_expert_of_120b(program):
    weights = _experts(128, 2880, 2880)
    for seed, expert in enumerate((0, 127, 64, 1) if program is ONE else (0,)):
        call = make_call(weights, program.published, seed=seed)
        call.topk_ids[0, 0] = expert
        program.check(call)


def test_experts_of_other_ranks_and_padding_are_never_multiplied(program):
    call = make_call(slices(uneven(program), 2, 6), program.tokens, experts=len(program.groups))
    if program is ONE:
        call.topk_ids[0] = torch.tensor([7, 3, -1, 4], device="cuda")
        program.check(call)
        return
    padding = slice(3, 5)
    call.topk_ids[padding] = -1
    call.topk_weights[padding] = 0
    call.hidden[padding] = float("nan")
    assert bool((program.check(call)[padding] == 0).all())


@pytest.mark.parametrize("program", SMALL, indirect=True)
@pytest.mark.parametrize("exponent", [-60, -20, 20])
def test_small_and_large_inputs_are_not_lost_in_the_products(program, exponent):
    """The weights are opened as denormals; without biases and clamp the outputs are as small or large."""
    weights = uneven(program)
    none = {"gate_up_proj_bias": weights.gate_up_proj_bias * 0, "down_proj_bias": weights.down_proj_bias * 0}
    call = make_call(dataclasses.replace(weights, **none), program.tokens)
    call.hidden *= 2.0**exponent
    call.limit = 1e30
    program.check(call)


def test_the_same_call_gives_the_same_bits(program):
    call = make_call(uneven(program), program.published)
    want = program.run(call)
    assert all(torch.equal(program.run(call), want) for _ in range(20))


@pytest.mark.parametrize("program", SMALL, indirect=True)
def test_the_second_projection_asks_for_its_weights_before_it_waits(program):
    from npu_gptoss.moe.triton import launches

    call = make_call(_experts(8, 2880, 2880), 1 if program is ONE else 8)
    down = program.module.down
    down.device_caches.clear()
    program.run(call)
    ((kernels, *_),) = down.device_caches.values()
    (compiled,) = kernels.values()
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    if program is ONE:
        shape = launches.one_gluon_tiles()
        load, steps = "ld.global.v4.b32", -(-12 // shape.splits)  # of 256 inputs
        loads = 4 * min(shape.down_deep, steps)
    else:  # a step: two tiles, of 16 rows of each warp two
        load, shape = "ld.global.v2.b32", launches.few_gluon_tiles(8)
        loads = shape.deep * 2 * 2 * (shape.rows // (16 * shape.warps))
    assert before.count(load) == loads
    assert load in after  # the inputs


# what a program's own structure invites; `verify --mutate` has the mistakes of the formula
MUTATIONS: dict[str, dict[str, tuple[str, str]]] = {
    "one": {
        "exponents of the next group": ("(ROWS * 4) + n % 4)", "(ROWS * 4) + (n + 1) % 4)"),
        "exponents of the first tiles": ("n // 4 * (ROWS * 4)", "n // 4 * 0"),
        "exponents of the first step for all": ("scale + step * (STEP // 2 * ROWS * 4)", "scale"),
        "weights of the first step for all": ("word + step * (STEP * ROWS * WORDS)", "word"),
        "weights of the first tile for all": ("j // WORDS * (ROWS * WORDS) + j % WORDS", "j % WORDS"),
        "weights of the first rows for all": ("+ inside * WORDS", "+ 0 * inside * WORDS"),
        "weights of the first expert": ("expert * KEPT", "0 * KEPT"),
        "weights of the first share for all": (
            "load_step(word, scale, begin + at,",
            "load_step(word, scale, 0 * begin + at,",
        ),
        "the steps before once more": ("begin + first + DEEP + at", "begin + first + at"),
        "inputs of the first share for all": ("at = begin * (STEP * INPUTS)", "at = 0 * begin * (STEP * INPUTS)"),
        "inputs of the first step for all": ("x_tiles.index(first + at)", "x_tiles.index(0 * first)"),
        "inputs of the other codes": ("PAIR * 4 + tile * 2 + HALF", "PAIR * 4 + tile * 2 + 1 - HALF"),
        "inputs of the other tiles": ("PAIR * 4 + tile * 2 + HALF", "(1 - PAIR) * 4 + tile * 2 + HALF"),
        "inputs of the last slot": ("inner + slot * K", "inner + (gl.num_programs(1) - 1) * K"),
        "bias in each share": ("mask=(m < R) & (split == 0)", "mask=m < R"),
    },
    "few": {
        "exponents of the next group": ("fields << (23 - 8 * (tile * 2 + half))", "fields << (15 - 8 * (tile + half))"),
        "the last exponent is the first": ("field = fields >> 1", "field = fields << 23"),
        "exponents of the first step for all": ("scale + step * ROWS", "scale"),
        "exponents of the first rows for all": ("* (STEPS * ROWS) + inside + (i", "* (STEPS * ROWS) + (i"),
        "weights of the first step for all": ("w = word + step * (2 * ROWS * WORDS)", "w = word"),
        "weights of the first tile for both": ("gl.load(w + ROWS * WORDS,", "gl.load(w,"),
        "weights of the first rows for all": ("inside * WORDS", "0 * inside"),
        "weights of the first expert": ("expert * KEPT", "0 * KEPT"),
        "the steps before once more": ("first + DEEP + at", "first + at"),
        "inputs of the first step for all": ("x_groups, first + at", "x_groups, at"),
        "inputs of the other group": ("step * 4 + tile * 2 + half", "step * 4 + tile * 2 + 1 - half"),
        "inputs of the other tile": ("step * 4 + tile * 2 + half", "step * 4 + 2 - tile * 2 + half"),
        "inputs of the other codes": ("one, other = right(", "other, one = right("),
        "inputs of the first token for all": ("(slot // PER_ROW)", "(slot * 0)"),
        "inputs of the first two slots for all": ("n = begin + gl.expand_dims", "n = 0 * begin + gl.expand_dims"),
        "the first columns for all": ("lists + expert * slots + done + n", "lists + expert * slots + n"),
        "the last slot lost": ("(done + n < count)", "(done + n < count - 1)"),
        "columns beyond the first lost": ("real = (n < SLOTS) &", "real = (done == 0) & (n < SLOTS) &"),
        "bias of the first expert": ("bias + expert * R + m", "bias + m"),
    },
    "many": {
        "half a tile where more is there": ("end - first > COLUMNS // 2", "end - first > COLUMNS // 2 + 1"),
        "the last slot of a group lost": ("real = place < end", "real = place < end - 1"),
        "weights of the first rows for all": (
            "word_tiles.index(stage).slice(NUMBER * HEIGHT, HEIGHT)",
            "word_tiles.index(stage).slice(0, HEIGHT)",
        ),
        "exponents of the first rows for all": (
            "scale_tiles.index(stage).slice(NUMBER * HEIGHT, HEIGHT)",
            "scale_tiles.index(stage).slice(0, HEIGHT)",
        ),
        "exponents of the other step": ("after, (step + 1) % 2 * 16, NUMBER", "after, step % 2 * 16, NUMBER"),
        "exponents of the first steps": ("scale + step // 2 * ROWS", "scale"),
        "inputs of the first step for all": ("source + step * INPUTS", "source"),
        "bias of the first expert": ("bias + expert * R + m", "bias + m"),
        "weights of the first expert": ("word_tile = expert * KEPT", "word_tile = 0 * KEPT"),
        "inputs of another token": ("gl.load(order + place) // TOP_K", "gl.load(order + place) * 0"),
    },
}
# those that are told by the fewest rows of weights and slots of a tile, and both shapes of `many`
MUTATED = [
    pytest.param((p, shape), change, id=f"{p.name}-{name}" if p is not MANY else f"{p.name}-{tile}-{name}")
    for p in (ONE, FEW, MANY)
    for tile, shape in p.shapes.items()
    if p is MANY or tile == "other"
    for name, change in MUTATIONS[p.name].items()
]


@pytest.mark.parametrize(("program", "change"), MUTATED, indirect=["program"])
def test_the_check_notices_a_mistake(program, change, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    call = make_call(uneven(program), 1) if program is ONE else program.grouped_call()
    program.check(call)
    wrong = mutated(program.module, tmp_path, change)
    for kernel in program.kernels:
        monkeypatch.setattr(program.module, kernel, getattr(wrong, kernel))
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        program.check(call)
