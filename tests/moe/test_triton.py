"""The Triton kernels of the experts and of routing: on a GPU where there is one, else in Triton's interpreter.

Uninitialised memory is filled with NaN, so that a read of unwritten memory is seen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound, bind, current_platform, platform_override
from npu_gptoss.kernels.platform import SUPPORTED
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import AnyExperts, expert_mlp, prepare_experts, route
from npu_gptoss.moe.operations import EXPERTS as OPERATION
from npu_gptoss.moe.operations import FEW_ROWS, experts_call
from npu_gptoss.moe.triton import layout, tuned
from npu_gptoss.verify.moe_cases import local_share, random_experts
from tests.moe.cases import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, close
from tests.refused import refused
from tests.tolerances import assert_close
from tests.triton import TRITON_HERE

pytestmark = pytest.mark.cuda if torch.cuda.is_available() else TRITON_HERE

ON_THIS_GPU = current_platform()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
FORMATS = ("bfloat16", "float8_e4m3fn", "mxfp4")
PATHS = {"one": "moe.experts.triton_one", "few": "moe.experts.triton_few", "many": "moe.experts.triton_many"}


@pytest.fixture(autouse=True)
def cuda_kernels() -> Iterator[None]:
    with platform_override("cuda", frozenset({"triton"})):
        yield


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_experts(weight_format: str, experts: int = EXPERTS, hidden: int = HIDDEN, inner: int = INTERMEDIATE):
    return random_experts(weight_format, BF16, torch.Generator(DEVICE).manual_seed(1), experts, hidden, inner)


@dataclasses.dataclass
class Call:
    """One call. `run`: by the kernel of that name, also where it would not be selected."""

    weights: AnyExperts
    hidden: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    limit: float = 7.0

    def run(self, kernel: str) -> torch.Tensor:
        return self.bound(kernel)()

    def bound(self, kernel: str) -> Callable[[], torch.Tensor]:
        """With the weights in the kernel's layout."""
        spec = registry.kernels[kernel]
        return functools.partial(
            spec.function,
            hidden_states=self.hidden,
            weights=spec.prepare(self.weights, self.limit),
            topk_weights=self.topk_weights,
            topk_ids=self.topk_ids,
            swiglu_limit=self.limit,
        )


def make_call(
    weights: AnyExperts, tokens: int, *, experts: int | None = None, top_k: int = TOP_K, seed: int = 0
) -> Call:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    hidden = torch.randn(tokens, weights.hidden_size, generator=generator, device=DEVICE).to(BF16)
    logits = torch.randn(tokens, experts or weights.num_experts, generator=generator, device=DEVICE)
    values, ids = logits.topk(top_k, dim=-1)
    return Call(weights, hidden, torch.softmax(values, -1), ids)


def check(call: Call, got: torch.Tensor) -> None:
    """Against the definition. The mutations of `test_kernels.py` show that it bites."""
    close(got, call.run("moe.experts.reference"), share=128)


def slices(weights: AnyExperts, first: int, last: int) -> AnyExperts:
    """The experts [first, last) as one rank of an expert-parallel group holds them."""
    share = local_share(weights, first, last)
    return dataclasses.replace(share, expert_map=share.expert_map.to(DEVICE))


@pytest.fixture(scope="module")
def experts() -> Callable[[str], AnyExperts]:
    made: dict[str, AnyExperts] = {}
    return lambda weight_format: made.setdefault(weight_format, make_experts(weight_format))


TOKENS = {"one": (1,), "few": (1, 11), "many": (1, 33)}


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("path", "tokens"), [(path, tokens) for path in PATHS for tokens in TOKENS[path]])
def test_paths_equal_the_definition(experts, weight_format, path, tokens):
    call = make_call(experts(weight_format), tokens)
    check(call, call.run(PATHS[path]))


@pytest.mark.parametrize("path", PATHS)
def test_experts_of_other_ranks_and_padding_are_never_multiplied(experts, path):
    """Their scratch holds NaN, and 0 * NaN is NaN."""
    share = slices(experts("mxfp4"), 2, 5)
    call = make_call(share, 1 if path == "one" else 11, experts=EXPERTS)
    if path == "one":
        call.topk_ids[0, 1:] = torch.tensor([3, -1, 4], device=DEVICE)
    else:
        call.topk_ids[3] = -1
        call.topk_weights[3] = 0
        call.hidden[3] = float("nan")
    got = call.run(PATHS[path])
    check(call, got)
    if path != "one":
        assert bool((got[3] == 0).all())


@pytest.mark.parametrize("path", PATHS)
def test_experts_without_tokens_are_never_multiplied(experts, path):
    """Their weights and biases are NaN here, and 0 * NaN is NaN."""
    call = make_call(experts("bfloat16"), 1 if path == "one" else 3, experts=TOP_K)  # of eight, the first four
    tensors = {name: value.clone() for name, value in vars(call.weights).items() if isinstance(value, torch.Tensor)}
    for tensor in tensors.values():
        tensor[TOP_K:] = float("nan")
    spoilt = dataclasses.replace(call, weights=dataclasses.replace(call.weights, **tensors))
    check(call, spoilt.run(PATHS[path]))


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_to_which_no_token_comes_gives_zero(experts, path):
    call = make_call(slices(experts("mxfp4"), 4, 8), 1 if path == "one" else 3, experts=EXPERTS)
    call.topk_ids[:] = torch.arange(TOP_K, device=DEVICE)
    assert bool((call.run(PATHS[path]) == 0).all())


@pytest.mark.parametrize("path", ["few", "many"])
def test_more_tokens_of_one_expert_than_a_tile_holds(experts, path):
    call = make_call(experts("mxfp4"), 20)
    call.topk_ids[:] = torch.arange(TOP_K, device=DEVICE)
    check(call, call.run(PATHS[path]))


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_slots_stay_in_order_within_an_expert_over_programs_and_rounds(experts, programs, monkeypatch):
    """A program sorts several blocks of 16 slots where there are more blocks than programs may be."""
    from npu_gptoss.moe.triton import launches

    monkeypatch.setattr(launches, "_SORT_CELLS", 16 * EXPERTS)
    monkeypatch.setattr(launches, "_SORT_PROGRAMS", programs)
    prepared = layout.prepare(slices(experts("mxfp4"), 2, 7), 7.0)
    ids = make_call(experts("mxfp4"), 100).topk_ids.to(torch.int32)
    ids[11:14] = -1
    order, ends = launches.sorted_slots(ids, prepared.expert_map, prepared, EXPERTS)
    local = torch.where(ids >= 0, prepared.expert_map[ids.clamp(min=0)], -1).flatten()
    groups = [torch.nonzero(local == expert).flatten() for expert in range(EXPERTS)]
    assert ends.tolist() == torch.tensor([len(group) for group in groups]).cumsum(0).tolist()
    want = torch.cat(groups)
    assert torch.equal(order[: len(want)].long(), want)


def test_fewer_slots_than_experts_read_each_expert_once_for_all_its_tokens():
    weights = make_experts("mxfp4", experts=16, hidden=32, inner=32)
    call = make_call(weights, 3)
    call.topk_ids[1] = call.topk_ids[0]
    check(call, call.run(PATHS["few"]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("tokens", "count"), [(1, 8), (3, 5), (300, 32)])
def test_routing_equals_the_definition_ties_included(dtype, tokens, count):
    logits = torch.randn(tokens, count, device=DEVICE).to(dtype)
    logits[0, 2] = logits[0, 4]
    weights, ids = route(logits, TOP_K, kernel="triton")
    want_weights, want_ids = route(logits, TOP_K, kernel="reference")
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids.long(), want_ids)  # its sort is stable: of equals the first
    assert_close(weights, want_weights)


def test_routing_of_nan_stays_within_the_experts():
    logits = torch.full((2, 8), float("nan"), device=DEVICE)
    _, ids = route(logits, TOP_K, kernel="triton")
    assert bool(((ids >= 0) & (ids < 8)).all())


def names(bound: Bound) -> list[str]:
    return [run.name for _, run in bound.ranges]


def test_all_paths_share_one_copy_of_the_weights(experts):
    prepared = prepare_experts(experts("mxfp4"))
    assert names(prepared.bound) == list(PATHS.values())
    assert [type(weights) for weights in prepared.layouts.values()] == [layout.TiledExperts]


def test_an_override_names_a_path_for_the_batches_that_it_is_for(experts, monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", "moe.experts.triton_few")
    assert names(prepare_experts(experts("mxfp4")).bound) == [PATHS["few"], PATHS["many"]]
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", "small_ops")
    assert names(prepare_experts(experts("mxfp4")).bound) == ["moe.experts.small_ops"]
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", "triton_fwe")
    with pytest.raises(InputError, match="names no kernel"):
        prepare_experts(experts("mxfp4"))


def test_the_path_follows_the_number_of_tokens(experts):
    from npu_gptoss.kernels.profiling import observing

    seen: list[str] = []
    prepared = prepare_experts(experts("bfloat16"))
    with observing(lambda name, arguments: seen.append(name)):
        for tokens in (1, 2, FEW_ROWS + 1):
            call = make_call(experts("bfloat16"), tokens, top_k=1)
            expert_mlp(call.hidden, prepared, call.topk_weights, call.topk_ids)
    assert seen == list(PATHS.values())


def test_scales_beyond_the_kernels_range_are_refused_in_words(experts):
    weights = experts("mxfp4")
    scales = weights.down_proj_scales.clone()
    scales[3, 5, 1] = layout.LARGEST_SCALE + 1
    with refused("scales"):
        prepare_experts(dataclasses.replace(weights, down_proj_scales=scales))


SIZES = {"dtype": BF16, "weight": "mxfp4", "num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(1, "gluon_one"), (48, "gluon_few"), (192, "triton_few"), (2047, "triton_many"), (None, "gluon_many")]),
        ({"num_experts": 128}, [(1, "gluon_one"), (48, "gluon_few"), (256, "triton_few"), (8191, "triton_many")]),
        ({"weight": "bfloat16"}, [(1, "triton_one"), (192, "triton_few"), (None, "triton_many")]),
        ({"hidden_size": 7232}, [(1, "gluon_one"), (192, "triton_few"), (2047, "triton_many"), (None, "gluon_many")]),
        ({"hidden_size": 128}, [(1, "gluon_one"), (48, "gluon_few"), (192, "triton_few"), (None, "triton_many")]),
        ({"intermediate_size": 96}, [(1, "gluon_one"), (48, "gluon_few"), (192, "triton_few"), (None, "triton_many")]),
    ],
)
def test_each_program_runs_only_for_sizes_it_was_measured_for(changes, expected):
    """Shared memory, whole steps of inputs, and enough pairs to an expert; on a Hopper."""
    with platform_override(SUPPORTED["cuda"]):
        bound = bind(OPERATION, functools.partial(experts_call, **{**SIZES, **changes}))
    got = [(most, run.name.rpartition(".")[2]) for most, run in bound.ranges]
    assert [name for _, name in got][: len(expected)] == [name for _, name in expected]
    assert [most for most, _ in got][: len(expected) - 1] == [most for most, _ in expected][:-1]


def test_few_slots_to_an_expert_have_the_smaller_tiles():
    wide, tall = tuned.GLUON
    slots = (tall * 32 - 1, tall * 32, wide * 32 - 1, wide * 32)
    assert [tuned.gluon_tiles(each, 32).columns for each in slots] == [128, 128, 128, 256]


# On a GPU, at the sizes of gpt-oss


@pytest.fixture(scope="module")
def published() -> Callable[[str], AnyExperts]:
    made: dict[str, AnyExperts] = {}

    def make(weight_format: str) -> AnyExperts:
        if weight_format not in made:
            made.clear()  # one at a time
            made[weight_format] = make_experts(weight_format, experts=32, hidden=2880, inner=2880)
        return made[weight_format]

    return make


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: `make test-cuda` there")
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("tokens", [8, 64, 192, 193, 512, 513, 2048])
def test_the_same_call_gives_the_same_bits_a_thousand_times(published, weight_format, tokens):
    """A write during a read shows seldom: in one call of a hundred, in some rows."""
    call = make_call(published(weight_format), tokens)
    with platform_override(ON_THIS_GPU):
        prepared = prepare_experts(call.weights)
    for path in {prepared.bound.of(tokens).name, PATHS["many"]}:
        run = call.bound(path)
        first = run()
        assert int(sum((run() != first).any() for _ in range(1000))) == 0, path


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: `make test-cuda` there")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_many_and_routing_give_a_token_the_same_bits_in_any_batch(published, weight_format):
    """vLLM's batch-invariant mode uses them for every number of tokens."""
    call = make_call(published(weight_format), 2048)
    logits = torch.randn(2048, 32, device=DEVICE).to(BF16)
    whole, (weights, _) = call.run(PATHS["many"]), route(logits, TOP_K)
    for tokens in (1, 2, 16, 63, 200, 256, 257, 600):
        part = Call(call.weights, *(each[:tokens] for each in (call.hidden, call.topk_weights, call.topk_ids)))
        assert torch.equal(part.run(PATHS["many"]), whole[:tokens]), tokens
        assert torch.equal(route(logits[:tokens], TOP_K)[0], weights[:tokens]), tokens
    if weight_format == "mxfp4":
        part = Call(call.weights, call.hidden[:16], call.topk_weights[:16], call.topk_ids[:16])
        assert not torch.equal(part.run(PATHS["few"]), whole[:16]), "the check sees no other bits"


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: `make test-cuda` there")
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_a_graph_replays_other_tokens_and_experts(tokens):
    weights = make_experts("mxfp4", experts=32, hidden=2880, inner=2880)
    with platform_override(ON_THIS_GPU):
        prepared = prepare_experts(weights)
    first, second = (make_call(weights, tokens, seed=seed) for seed in (0, 1))
    inputs = [first.hidden.clone(), first.topk_weights.clone(), first.topk_ids.int().clone()]

    def run() -> torch.Tensor:
        return expert_mlp(inputs[0], prepared, inputs[1], inputs[2])

    torch.use_deterministic_algorithms(False)  # filling new memory is not for a captured graph
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for call in (second, first):
        for static, new in zip(inputs, (call.hidden, call.topk_weights, call.topk_ids), strict=True):
            static.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        check(call, out)
        assert torch.equal(out, run()), "the same call twice gives the same bits"
