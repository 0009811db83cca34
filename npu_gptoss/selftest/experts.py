"""Routing and experts in the shapes at which their operators change course, each against the definition.

CANN's public history knows one defect of these operators on a 910B, the row count of the call before on a rank with a
part of the experts. So most cases stand at edges: groups without rows, tiles of 128 rows, a sort that goes from one
core to many above 6080 pairs, a rank without any token.

All experts share one matrix, whose columns are rolled by the expert's number: that is exact, no two experts are alike,
and one product on the host gives them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from npu_gptoss.moe import ExpertWeights, expert_mlp, prepare_experts, route
from npu_gptoss.moe.activation import swigluoai
from npu_gptoss.moe.ascend import AscendExperts, grouped_mlp
from npu_gptoss.selftest.outcome import Outcome, compared, deviation, judged, poison
from npu_gptoss.verify.cases import TOP_K, expert_map


@dataclass(frozen=True)
class Sizes:
    """A layer's experts as a rank has them: [first, last) of `experts`, each hidden x inner (this rank's part)."""

    hidden: int
    inner: int
    experts: int
    held: tuple[int, int]

    @property
    def is_part(self) -> bool:
        return self.held != (0, self.experts)


Choice = Callable[[int, Sizes, torch.Generator], torch.Tensor]  # tokens -> ids [tokens, k]


def among(allowed: Callable[[int, Sizes], bool]) -> Choice:
    """Four different experts for each token, or as many as there are."""

    def choose(tokens: int, sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
        candidates = torch.tensor([expert for expert in range(sizes.experts) if allowed(expert, sizes)])
        k = min(TOP_K, len(candidates))
        return candidates[torch.rand(tokens, len(candidates), generator=generator).topk(k).indices]

    return choose


def always(expert: int) -> Choice:
    """One expert for all; -1 is the last."""
    return lambda tokens, sizes, _: torch.full((tokens, 1), expert % sizes.experts)


def backwards(tokens: int, sizes: Sizes, _: torch.Generator) -> torch.Tensor:
    """The last expert's tokens first."""
    pairs = torch.arange(tokens * TOP_K) * sizes.experts // (tokens * TOP_K)
    return (sizes.experts - 1 - pairs).view(tokens, TOP_K)


anywhere = among(lambda expert, sizes: True)
every_second = among(lambda expert, sizes: expert % 2 == 1 and expert < sizes.experts - 1)
elsewhere = among(lambda expert, sizes: not sizes.held[0] <= expert < sizes.held[1])


@dataclass(frozen=True)
class Case:
    """tokens: of each call; calls: with other choices each, and no wait between them; hidden, inner: in the place of
    the rank's own sizes, where they do not matter; bias: its standard deviation; of_part: for a rank that holds a part
    of the experts; suspect: whose defect it shows, with the release."""

    name: str
    tokens: tuple[int, ...]
    choose: Choice
    suspect: str
    calls: int = 1
    hidden: int | None = None
    inner: int | None = None
    bias: float = 1.0
    of_part: bool = False
    at_start: bool = True

    def sizes(self, rank: Sizes) -> Sizes:
        return replace(rank, hidden=self.hidden or rank.hidden, inner=self.inner or rank.inner)


GROUPS = "npu_grouped_matmul with groups that have no rows"
TILES = "npu_grouped_matmul at the edge of its tiles of 128 rows"
SORT = "npu_moe_init_routing_v2, whose sort takes many cores above 6080 pairs, or npu_moe_token_unpermute"
COUNTS = (
    "npu_moe_init_routing_v2 reads the row count of the call before (ops-transformer 87b1db69e, mended in CANN 9.0.0; "
    "on ranks with a part of the experts only)"
)
NO_ROWS = "a rank without rows, whose results nobody wrote (op-plugin beb79eff, CANN 9.1 and torch-npu 2.7.1.post4)"
ACTIVATION = "the activation: clamp, addcmul and npu_swiglu, or npu_clipped_swiglu from CANN 8.5 on"

CASES = (
    Case("few tokens", (1, 17), anywhere, GROUPS),
    Case("every second expert", (17,), every_second, GROUPS),
    Case("all to the first expert", (17,), always(0), GROUPS),
    Case("all to the last expert", (17,), always(-1), GROUPS),
    Case("edges of a tile", (127, 128, 129), always(1), TILES, at_start=False),
    Case("a part of the experts", (17,), anywhere, COUNTS, calls=3, of_part=True),
    Case("tokens of other ranks only", (1, 64), elsewhere, NO_ROWS, of_part=True),
    Case("counts that change", (17, 2049), anywhere, COUNTS, calls=10, inner=64, of_part=True, at_start=False),
    Case("sort on one core and on many", (129, 1100, 2049, 4096), anywhere, SORT, inner=64, at_start=False),
    Case("sort backwards", (16384,), backwards, SORT, hidden=32, inner=32, at_start=False),
    *(
        Case(f"activation {inner} wide", (1, 17, 1100), anywhere, ACTIVATION, 1, 64, inner, bias=6.0, at_start=False)
        for inner in (2880, 1440, 720)
    ),
)


@dataclass(frozen=True)
class Layer:
    """One matrix for all experts. gate_up [hidden, 2 * inner], gate and up interleaved; down [inner, hidden]; biases
    [experts, …]; all on the CPU, in the dtype that serves."""

    sizes: Sizes
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor

    @classmethod
    def random(cls, sizes: Sizes, bias: float, dtype: torch.dtype) -> Layer:
        generator = torch.Generator().manual_seed(sizes.hidden + sizes.inner)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(dtype)

        return cls(
            sizes,
            normal(sizes.hidden, 2 * sizes.inner, std=sizes.hidden**-0.5),
            normal(sizes.experts, 2 * sizes.inner, std=bias),
            normal(sizes.inner, sizes.hidden, std=sizes.inner**-0.5 / (1 + bias)),
            normal(sizes.experts, sizes.hidden, std=0.5),
        )

    def weights(self, device: torch.device) -> ExpertWeights:
        """This rank's experts in the official layout."""
        first, last = self.sizes.held
        places = expert_map(self.sizes.experts, first, last).to(device) if self.sizes.is_part else None

        def rolled(matrix: torch.Tensor) -> torch.Tensor:
            there = matrix.to(device)
            cuts = [matrix.shape[1] - expert % matrix.shape[1] for expert in range(first, last)]
            return torch.stack([torch.cat([there[:, cut:], there[:, :cut]], 1) for cut in cuts])

        return ExpertWeights(
            rolled(self.gate_up),
            self.gate_up_bias[first:last].to(device),
            rolled(self.down),
            self.down_bias[first:last].to(device),
            places,
        )

    def want(self, hidden: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The definition in fp32, on the CPU: [tokens, hidden], the sum over this rank's experts."""
        products, down = hidden.float() @ self.gate_up.float(), self.down.float()
        out = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in range(*self.sizes.held):
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            if len(token):
                inner = swigluoai(products[token].roll(expert, 1) + self.gate_up_bias[expert].float())
                result = (inner @ down).roll(expert, 1) + self.down_bias[expert].float()
                out.index_add_(0, token, result * topk_weights[token, slot, None])
        return out


def outcomes(
    cases: Iterable[Case], rank: Sizes, device: torch.device, dtype: torch.dtype, repeats: int
) -> Iterator[Outcome]:
    """Each case on the device, with the kernels that would serve, `repeats` times with the same inputs."""
    poison(device)
    place = functools.lru_cache(maxsize=1)(functools.partial(_placed, device=device, dtype=dtype))
    for case in cases:
        layer, prepared = place(case.sizes(rank), case.bias)
        for tokens in case.tokens:
            yield _outcome(case, tokens, layer, prepared, device, dtype, repeats)


def _placed(sizes: Sizes, bias: float, *, device: torch.device, dtype: torch.dtype) -> tuple[Layer, object]:
    layer = Layer.random(sizes, bias, dtype)
    return layer, prepare_experts(layer.weights(device))


def _outcome(
    case: Case, tokens: int, layer: Layer, prepared: object, device: torch.device, dtype: torch.dtype, repeats: int
) -> Outcome:
    generator = torch.Generator().manual_seed(tokens)
    what = f"experts, {case.name}, {tokens} tokens"
    inputs = []
    for _ in range(case.calls):
        ids = case.choose(tokens, layer.sizes, generator)
        hidden = torch.randn(tokens, layer.sizes.hidden, generator=generator).to(dtype)
        inputs.append((hidden, torch.rand(ids.shape, generator=generator).softmax(-1), ids))
    there = [[tensor.to(device) for tensor in call] for call in inputs]

    def run() -> list[torch.Tensor]:  # all calls are under way before anything waits
        return [out.cpu() for out in [expert_mlp(hidden, prepared, *rest) for hidden, *rest in there]]

    wants = [layer.want(*call) for call in inputs]
    try:
        return compared(what, case.suspect, run, wants, repeats)
    except RuntimeError as error:  # what an operator or the driver has against it
        return Outcome(what, case.suspect, float("inf"), f"it raised {' '.join(str(error).split())[:200]}")


def group_lists(rank: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """Rows of each group as counts and as their cumulative ends give the same bits; for CANN's operators only."""
    held = rank.held[1] - rank.held[0]
    sizes = replace(rank, experts=held, held=(0, held), inner=64)
    layer = Layer.random(sizes, 1.0, dtype)
    experts = prepare_experts(layer.weights(device)).weights
    if not isinstance(experts, AscendExperts):
        return
    counts = torch.tensor([expert % 3 * 5 for expert in range(held)])
    rows = torch.randn(int(counts.sum()), sizes.hidden, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    by_count, by_end = (
        grouped_mlp(rows, experts, groups.to(device), kind).cpu()
        for kind, groups in ((1, counts), (0, counts.cumsum(0)))
    )
    ids = torch.repeat_interleave(torch.arange(held), counts)[:, None]
    want = layer.want(rows.cpu(), torch.full(ids.shape, experts.gain), ids)
    outcome = judged("experts, groups as counts and as ends", GROUPS, deviation(by_count, want))
    if not outcome.problem and not torch.equal(by_count, by_end):
        outcome = replace(outcome, problem="ends gave other bits than counts")
    yield outcome


GATES = ((1, 32), (3, 128), (257, 32), (4096, 128))  # tokens, experts
GATE_LIMIT = 1e-4  # of a softmax in fp32


def gates(shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """The choice of experts: ties, and a row that leaves four experts to choose."""
    for tokens, experts in shapes:
        logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        logits[tokens // 2] = logits[tokens // 2].round()  # ties, of which any may be chosen
        if tokens > 1:
            logits[0, TOP_K:] = float("-inf")
        weights, ids = (tensor.cpu() for tensor in route(logits.to(device), TOP_K))
        largest = logits.float().topk(TOP_K).values
        what, suspect = f"routing, {tokens} tokens to {experts} experts", "npu_moe_gating_top_k_softmax"
        ids = ids.long()
        legal = ids.min() >= 0 and ids.max() < experts and ids.sort().values.diff().all()
        if not legal or not torch.equal(logits.float().gather(1, ids), largest):
            yield Outcome(what, suspect, float("inf"), "the experts chosen are not those of the largest logits")
            continue
        yield judged(what, suspect, deviation(weights, largest.softmax(-1)), GATE_LIMIT)
