"""Routing and experts in the shapes at which CANN's operators change course.

CANN's public history knows one defect of these operators on a 910B: on a rank with a part of the experts, the row count
of the call before is read. The other cases are edges: groups without rows, tiles of 128 rows, a sort that moves from
one core to many above 6080 pairs, a rank without any token.

All experts share one matrix, whose columns are rolled by the expert's number. That is exact, no two experts are alike,
and one product on the host gives the definition of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from npu_gptoss.moe import ExpertWeights, PreparedExperts, expert_mlp, prepare_experts, route
from npu_gptoss.moe.activation import swigluoai
from npu_gptoss.moe.ascend import AscendExperts, grouped_mlp
from npu_gptoss.verify.cases import poison
from npu_gptoss.verify.compare import Outputs, Result, Verdict, by_rows, checked, compare
from npu_gptoss.verify.moe_cases import TOP_K, chosen, expert_map
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.tolerances import EXACT, GATE_ROWS

Choice = Callable[[int, Rank, torch.Generator], torch.Tensor]  # tokens -> ids [tokens, k]


def among(allowed: Callable[[int, Rank], bool]) -> Choice:
    """Four different experts for each token, or as many as there are."""

    def choose(tokens: int, rank: Rank, generator: torch.Generator) -> torch.Tensor:
        candidates = torch.tensor([expert for expert in range(rank.experts) if allowed(expert, rank)])
        k = min(TOP_K, len(candidates))
        return candidates[torch.rand(tokens, len(candidates), generator=generator).topk(k).indices]

    return choose


def always(expert: int) -> Choice:
    """One expert for all tokens; -1 is the last expert."""
    return lambda tokens, rank, _: torch.full((tokens, 1), expert % rank.experts)


def backwards(tokens: int, rank: Rank, _: torch.Generator) -> torch.Tensor:
    """The last expert's tokens first."""
    pairs = torch.arange(tokens * TOP_K) * rank.experts // (tokens * TOP_K)
    return (rank.experts - 1 - pairs).view(tokens, TOP_K)


anywhere = among(lambda expert, rank: True)
every_second = among(lambda expert, rank: expert % 2 == 1 and expert < rank.experts - 1)
elsewhere = among(lambda expert, rank: not rank.held[0] <= expert < rank.held[1])


@dataclass(frozen=True)
class Case:
    """tokens: of each call. calls: how many with other choices, without a wait between them. hidden, inner: instead of
    the rank's own sizes, where these do not matter. bias: its standard deviation. of_part: for a rank that holds a part
    of the experts. suspect: the defect that it shows, with its release. later: not at a server's start."""

    name: str
    tokens: tuple[int, ...]
    choose: Choice
    suspect: str
    calls: int = 1
    hidden: int | None = None
    inner: int | None = None
    bias: float = 1.0
    of_part: bool = False
    later: bool = False

    def sizes(self, rank: Rank) -> Rank:
        return replace(rank, hidden=self.hidden or rank.hidden, inner=self.inner or rank.inner)


GROUPS = "npu_grouped_matmul with groups that have no rows"
TILES = "npu_grouped_matmul at the edge of its tiles of 128 rows"
SORT = "npu_moe_init_routing_v2, whose sort takes many cores above 6080 pairs, or npu_moe_token_unpermute"
COUNTS = (
    "npu_moe_init_routing_v2 reads the row count of the call before (ops-transformer 87b1db69e, repaired in CANN "
    "9.0.0; on ranks with a part of the experts only)"
)
NO_ROWS = (
    "a rank without rows, whose results were never written (op-plugin beb79eff, CANN 9.1 and torch-npu 2.7.1.post4)"
)
ACTIVATION = "the activation: clamp, addcmul and npu_swiglu, or npu_clipped_swiglu from CANN 8.5 on"

CASES = (
    Case("few tokens", (1, 17), anywhere, GROUPS),
    Case("every second expert", (17,), every_second, GROUPS),
    Case("all to the first expert", (17,), always(0), GROUPS),
    Case("all to the last expert", (17,), always(-1), GROUPS),
    Case("edges of a tile", (127, 128, 129), always(1), TILES, later=True),
    Case("a part of the experts", (17,), anywhere, COUNTS, calls=3, of_part=True),
    Case("tokens of other ranks only", (1, 64), elsewhere, NO_ROWS, of_part=True),
    Case("counts that change", (17, 2049), anywhere, COUNTS, calls=10, inner=64, of_part=True, later=True),
    Case("sort on one core and on many", (129, 1100, 2049, 4096), anywhere, SORT, inner=64, later=True),
    Case("sort backwards", (16384,), backwards, SORT, hidden=32, inner=32, later=True),
    *(
        Case(f"activation {wide} wide", (1, 17, 1100), anywhere, ACTIVATION, 1, 64, wide, bias=6.0, later=True)
        for wide in (2880, 1440, 720)
    ),
)
GATES = ((1, 32), (3, 128), (257, 32), (4096, 128))  # (tokens, experts)


@dataclass(frozen=True)
class Layer:
    """One matrix for all experts. gate_up [hidden, 2 * inner], gate and up interleaved; down [inner, hidden]; biases
    [experts, …]; all on the CPU, in the rank's dtype."""

    rank: Rank
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor

    @classmethod
    def random(cls, rank: Rank, bias: float = 1.0) -> Layer:
        generator = torch.Generator().manual_seed(rank.hidden + rank.inner)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(rank.dtype)

        return cls(
            rank,
            normal(rank.hidden, 2 * rank.inner, std=rank.hidden**-0.5),
            normal(rank.experts, 2 * rank.inner, std=bias),
            normal(rank.inner, rank.hidden, std=rank.inner**-0.5 / (1 + bias)),
            normal(rank.experts, rank.hidden, std=0.5),
        )

    def weights(self) -> ExpertWeights:
        """This rank's experts in the official layout, on its device."""
        (first, last), device = self.rank.held, self.rank.device
        places = expert_map(self.rank.experts, first, last).to(device) if self.rank.is_part else None

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
        for expert in range(*self.rank.held):
            token, slot = torch.nonzero(ids == expert, as_tuple=True)
            if len(token):
                inner = swigluoai(products[token].roll(expert, 1) + self.gate_up_bias[expert].float())
                result = (inner @ down).roll(expert, 1) + self.down_bias[expert].float()
                out.index_add_(0, token, result * topk_weights[token, slot, None])
        return out


def results(rank: Rank) -> Iterator[Result]:
    """Experts on this rank; beyond the start also routing, group lists, and a rank with a quarter of the experts."""
    if rank.short:
        yield from results_of([case for case in CASES if not case.later and (rank.is_part or not case.of_part)], rank)
        return
    yield from routing(rank)
    yield from routing(replace(rank, dtype=torch.float32))
    yield from group_lists(rank)
    yield from results_of([case for case in CASES if not case.of_part], rank)
    yield from results_of([case for case in CASES if case.of_part], rank.part)


def results_of(cases: Iterable[Case], rank: Rank) -> Iterator[Result]:
    """Each case on the device, with the kernels that would serve."""
    poison(rank.device)

    @functools.lru_cache(maxsize=1)
    def placed(sizes: Rank, bias: float) -> tuple[Layer, PreparedExperts]:
        layer = Layer.random(sizes, bias)
        return layer, prepare_experts(layer.weights())

    for case in cases:
        for tokens in case.tokens:
            yield _result(case, tokens, *placed(case.sizes(rank), case.bias))


def _result(case: Case, tokens: int, layer: Layer, prepared: PreparedExperts) -> Result:
    rank, generator = layer.rank, torch.Generator().manual_seed(tokens)
    inputs = []
    for _ in range(case.calls):
        ids = case.choose(tokens, rank, generator)
        hidden = torch.randn(tokens, rank.hidden, generator=generator).to(rank.dtype)
        inputs.append((hidden, torch.rand(ids.shape, generator=generator).softmax(-1), ids))
    there = [[tensor.to(rank.device) for tensor in call] for call in inputs]

    def run() -> Outputs:  # all calls are under way before anything waits
        return _numbered([expert_mlp(hidden, prepared, *rest) for hidden, *rest in there])

    want = _numbered([layer.want(*call) for call in inputs])
    call = f"experts, {case.name}, {tokens} tokens"
    return checked(call, run, by_rows(want), repeats=rank.repeats, suspect=case.suspect)[0]


def _numbered(outs: list[torch.Tensor]) -> Outputs:
    return {f"out {number}": out.cpu() for number, out in enumerate(outs)}


def group_lists(rank: Rank) -> Iterator[Result]:
    """Rows of each group as counts and as cumulative ends give the same bits; for CANN's operators only."""
    held = rank.held[1] - rank.held[0]
    layer = Layer.random(replace(rank, experts=held, held=(0, held), inner=64))
    experts = prepare_experts(layer.weights()).weights
    if not isinstance(experts, AscendExperts):
        return
    counts = torch.tensor([expert % 3 * 5 for expert in range(held)])
    rows = torch.randn(int(counts.sum()), rank.hidden, generator=torch.Generator().manual_seed(0)).to(rank.dtype)
    by_count, by_end = (
        grouped_mlp(rows.to(rank.device), experts, groups.to(rank.device), kind).cpu()
        for kind, groups in ((1, counts), (0, counts.cumsum(0)))
    )
    ids = torch.repeat_interleave(torch.arange(held), counts)[:, None]
    want = {"out": layer.want(rows, torch.full(ids.shape, experts.gain), ids)}
    call = "experts, groups as counts and as ends"
    result, _ = checked(call, lambda: {"out": by_count}, by_rows(want), suspect=GROUPS)
    if not result.wrong and not torch.equal(by_count, by_end):
        result = result.failed("ends gave other bits than counts")
    yield result


def routing(rank: Rank) -> Iterator[Result]:
    """The choice of experts: ties, and a row that leaves four experts to choose."""
    for tokens, experts in ((1, rank.experts), (257, rank.experts)) if rank.short else GATES:
        logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens)).to(rank.dtype)
        logits[tokens // 2] = logits[tokens // 2].round()  # ties, of which any may be chosen
        if tokens > 1:
            logits[0, TOP_K:] = float("-inf")
        largest = logits.float().topk(TOP_K).values
        want = {"weights": largest.softmax(-1), "logits": largest, "distinct": torch.full((tokens,), TOP_K)}

        def run(logits: torch.Tensor = logits) -> Outputs:
            return chosen(logits, *(tensor.cpu() for tensor in route(logits.to(rank.device), TOP_K)))

        def judge(got: Outputs, want: Outputs = want) -> Verdict:
            return compare(got, want, {"weights": GATE_ROWS[got["weights"].dtype], "logits": EXACT, "distinct": EXACT})

        call = f"routing, {tokens} tokens to {experts} experts"
        suspect = "npu_moe_gating_top_k_softmax"
        yield checked(call, run, judge, suspect=suspect)[0]
