"""Routing and experts on an Ascend 910B: sort, grouped matmul, activation, grouped matmul, weighted sum.

Requirements of the operators (CANN 8.3, from their tiling code; no hardware has confirmed our reading):

* `npu_moe_gating_top_k_softmax`: softmax over all experts, then top-k, so the k weights are renormalised here; its
  `_v2` with `renorm=1` takes the softmax over the k: one launch for four, where the wheel has it (torch-npu 2.10);
* `npu_moe_init_routing_v2`: most of its defaults are illegal, so all arguments are given; int32 expert ids;
* `npu_grouped_matmul`: weight [experts, in, out]; with bfloat16 operands the bias is float32, so it is converted once
  at load (upstream casts it in every call);
* `npu_swiglu` is silu(a) * b on halves: gate and up are de-interleaved at load, and `clipped_swiglu` brings the
  activation into that form where there is no `npu_clipped_swiglu` (CANN before 8.5). That form comes out `GAIN` times
  as large: the routing weights are divided by it, and the bias of the second product is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from npu_gptoss import cann
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import ANY, ASCEND, EMULATED_FP32, TRITON_ASCEND, Capability, Priority, accepts, register_kernel
from npu_gptoss.kernels.platform import GATING_V2
from npu_gptoss.moe.activation import ALPHA, SWIGLUOAI
from npu_gptoss.moe.expert_format import GROUP_COUNTS, arrange, grouped_matmul
from npu_gptoss.moe.operations import EXPERTS, ROUTE
from npu_gptoss.moe.packed import PackedMatrix, expand, pack
from npu_gptoss.moe.weights import AnyExperts, ExpertWeights, Mxfp4Experts

# What the activation of three launches is larger by. With a = bf16(1.702) * gate it is 1.703125 for a small gate; one
# that is clamped to 7 rounds up, 0.13 % more. In between lies the factor that leaves the least slope at every size of
# the pre-activations: within 4e-4 from a standard deviation of 0.05 to one of 8 (tests/moe/test_ascend.py).
# b = up + 1 needs no constant at all; (up + 1) / 1.702 in bf16 made every output 0.2 % small.
GAIN = {torch.bfloat16: 1.7035, torch.float32: ALPHA}


@dataclass(frozen=True)
class AscendExperts:
    """One layer's local experts in the layout of the operators.

    gate_up_proj: [experts, hidden, 2 * intermediate], all gate columns, then all up columns.
    Biases float32, that of down_proj times `gain`. lower, upper, scale, offset: [2 * intermediate], the activation's
    clamp and affine step. gain: the factor between rows of `grouped_mlp` and the experts' outputs.
    expert_range: [first, last) of the global experts; num_experts: all of them.
    packed: of the two projections, where these are in MXFP4. gate_up_proj and down_proj are then one layer's room that
    all layers share: a step expands the experts it uses into it before the product.
    """

    gate_up_proj: torch.Tensor
    gate_up_proj_bias: torch.Tensor
    down_proj: torch.Tensor
    down_proj_bias: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor
    swiglu_limit: float
    gain: float
    expert_range: tuple[int, int]
    num_experts: int
    packed: tuple[PackedMatrix, PackedMatrix] | None = None

    @property
    def all_local(self) -> bool:
        return self.expert_range == (0, self.num_experts)

    def weigh(self, topk_weights: torch.Tensor) -> torch.Tensor:
        """The routing weights [tokens, k] float32 for the rows of `grouped_mlp`."""
        return topk_weights if self.gain == 1 else topk_weights / self.gain


def halves(interleaved: torch.Tensor) -> torch.Tensor:
    """[..., 2 * n] gate, up, gate, up … -> all of gate, then all of up."""
    return torch.cat([interleaved[..., 0::2], interleaved[..., 1::2]], dim=-1)


def expert_range(weights: AnyExperts) -> tuple[int, int, int]:
    """(first, last, number of all experts); the operators route to one contiguous range only."""
    if weights.expert_map is None:
        return 0, weights.num_experts, weights.num_experts
    local = weights.expert_map.tolist()
    held = [i for i, index in enumerate(local) if index >= 0]
    first = held[0] if held else 0
    if [local[i] for i in held] != list(range(weights.num_experts)) or held != list(range(first, first + len(held))):
        raise InputError(
            f"on Ascend a rank holds a contiguous range of the experts in order, got the map {local}; "
            "leave expert placement at 'linear'",
            field="expert_map",
        )
    return first, first + len(held), len(local)


def prepare(weights: ExpertWeights, swiglu_limit: float) -> AscendExperts:
    """The work that is done once, at load: columns to halves, biases to float32, the activation's constants."""
    gate_up = halves(weights.gate_up_proj)
    made = _prepared(weights, gate_up, weights.down_proj, swiglu_limit)
    return replace(
        made,
        gate_up_proj=arrange(gate_up, made.gate_up_proj_bias),
        down_proj=arrange(weights.down_proj, made.down_proj_bias),
    )


def _prepared(
    weights: AnyExperts,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    swiglu_limit: float,
    packed: tuple[PackedMatrix, PackedMatrix] | None = None,
) -> AscendExperts:
    first, last, total = expert_range(weights)
    intermediate = down.shape[1]
    gain = 1.0 if has_clipped_swiglu() else GAIN[gate_up.dtype]
    gate_up_bias, down_bias = halves(weights.gate_up_proj_bias).float(), weights.down_proj_bias.float() * gain

    def columns(gate: float, up: float) -> torch.Tensor:
        return torch.cat([gate_up.new_full((intermediate,), gate), gate_up.new_full((intermediate,), up)])

    return AscendExperts(
        gate_up_proj=gate_up,
        gate_up_proj_bias=gate_up_bias,
        down_proj=down,
        down_proj_bias=down_bias,
        lower=columns(float("-inf"), -swiglu_limit),
        upper=columns(swiglu_limit, swiglu_limit),
        scale=columns(ALPHA, 1.0),
        offset=columns(0.0, 1.0),
        swiglu_limit=swiglu_limit,
        gain=gain,
        expert_range=(first, last),
        num_experts=total,
        packed=packed,
    )


# (shape, device) -> one layer's experts in bfloat16. As long as a process: graphs keep its address.
_rooms: dict[tuple[tuple[int, int, int], torch.device], torch.Tensor] = {}


def room(packed: PackedMatrix) -> torch.Tensor:
    """Returns memory for one layer's experts, expanded; layers follow each other on one stream, so all share it."""
    key = packed.shape, packed.words.device
    if key not in _rooms:
        _rooms[key] = torch.zeros(packed.shape, dtype=torch.bfloat16, device=packed.words.device)
    return _rooms[key]


def prepare_packed(weights: Mxfp4Experts, swiglu_limit: float) -> AscendExperts:
    """Prepares weights that stay in MXFP4: 4.25 bits each, and one layer's room in bfloat16."""
    gate_up = pack(weights.gate_up_proj_blocks, weights.gate_up_proj_scales, halves=True)
    down = pack(weights.down_proj_blocks, weights.down_proj_scales, halves=False)
    return _prepared(weights, room(gate_up), room(down), swiglu_limit, (gate_up, down))


def touched(group_list: torch.Tensor, group_list_type: int) -> torch.Tensor:
    """[experts] int32 on the device: an expert that has rows is itself, others are -1. Nothing waits for it."""
    counts = group_list if group_list_type == GROUP_COUNTS else torch.diff(group_list, prepend=group_list.new_zeros(1))
    ids = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)
    return torch.where(counts > 0, ids, -1)


def has_clipped_swiglu() -> bool:
    """Tells whether CANN has it: from 8.5 on. torch-npu since 2.7.1.post2 has the name on 8.3 too, but no kernel."""
    import torch_npu

    in_use = cann.series(torch_npu.npu.utils.get_cann_version() or "") or (0, 0)
    return in_use >= (8, 5) and hasattr(torch_npu, "npu_clipped_swiglu")


def clipped_swiglu(gate_up: torch.Tensor, experts: AscendExperts) -> torch.Tensor:
    """[rows, 2 * intermediate] halves -> [rows, intermediate], in one launch or three; `experts.gain` times as large.

    With a = 1.702 * gate and b = up + 1, silu(a) * b = 1.702 * (up + 1) * gate * sigmoid(1.702 * gate).
    """
    import torch_npu

    if experts.gain == 1:
        return torch_npu.npu_clipped_swiglu(
            gate_up, dim=-1, alpha=ALPHA, limit=experts.swiglu_limit, bias=1.0, interleaved=False
        )
    clamped = torch.clamp(gate_up, experts.lower, experts.upper)
    return torch_npu.npu_swiglu(torch.addcmul(experts.offset, clamped, experts.scale))


def grouped_mlp(
    rows: torch.Tensor, experts: AscendExperts, group_list: torch.Tensor, group_list_type: int
) -> torch.Tensor:
    """The experts on rows sorted by expert: [rows, hidden] -> [rows, hidden], `experts.gain` times their outputs.

    Rows of no group come out undefined.

    group_list: [local experts] int64 on the device, counts (type 1) or cumulative (type 0), as the dispatcher has it.
    """
    if experts.packed is not None:
        ids = touched(group_list, group_list_type)
        for matrix, place in zip(experts.packed, (experts.gate_up_proj, experts.down_proj), strict=True):
            expand(matrix, ids, place)
    gate_up = grouped_matmul(rows, experts.gate_up_proj, experts.gate_up_proj_bias, group_list, group_list_type)
    activated = clipped_swiglu(gate_up, experts)
    return grouped_matmul(activated, experts.down_proj, experts.down_proj_bias, group_list, group_list_type)


def finite_first_row(rows: torch.Tensor) -> None:
    """Makes numbers of the first row, in place. Rows that belong to other ranks are all read there and weighted with
    zero; when no token came to this rank the row was never computed, and zero times what memory held may be NaN."""
    rows[:1].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@register_kernel(
    ROUTE,
    solution="ascend",
    capability=ASCEND,
    signatures=(accepts(logits=("bfloat16", "float32")),),
    priority=Priority.PERFORMANT,
)
def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_moe_gating_top_k_softmax in fp32, renormalised over the k."""
    import torch_npu

    # softmax over all, divided by the sum over the k, is the softmax over the k
    weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax(logits.float(), None, k=top_k)
    return weights / weights.sum(-1, keepdim=True), ids


@register_kernel(
    ROUTE,
    name=f"{ROUTE.name}.ascend_one_launch",
    solution="ascend",
    capability=Capability.of("ascend", features=("torch_npu", GATING_V2)),
    signatures=(accepts(logits=("bfloat16", "float32")),),
    priority=Priority.PERFORMANT + 1,
)
def route_in_one_launch(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_moe_gating_top_k_softmax_v2: computed in fp32 and rounded once, to the dtype of the logits.

    openai/gpt-oss and transformers round the weights to bfloat16, too.
    """
    import torch_npu

    weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits, k=top_k, renorm=1)
    return weights, ids


@register_kernel(
    EXPERTS,
    solution="ascend",
    capability=ASCEND,
    signatures=(
        accepts(hidden="bfloat16", weight="bfloat16"),
        accepts(hidden="float32", weight="float32", needs=EMULATED_FP32),
    ),
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY},
    priority=Priority.PERFORMANT,
    prepare=prepare,
)
def expert_mlp(
    hidden_states: torch.Tensor,
    weights: AscendExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """npu_moe_init_routing_v2, two npu_grouped_matmul around the activation, npu_moe_token_unpermute."""
    import torch_npu

    rows, row_index, counts, _ = torch_npu.npu_moe_init_routing_v2(
        hidden_states,
        topk_ids.to(torch.int32),
        scale=None,
        offset=None,
        active_num=topk_ids.numel(),
        expert_capacity=-1,
        expert_num=weights.num_experts,
        drop_pad_mode=0,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=list(weights.expert_range),
        row_idx_type=0,
    )
    down = grouped_mlp(rows, weights, counts, GROUP_COUNTS)
    topk_weights = weights.weigh(topk_weights)
    if not weights.all_local:
        # The index of other ranks' rows is -1, which the sum would read as an address: they become the first row, which
        # counts nothing.
        finite_first_row(down)
        topk_weights = topk_weights * (row_index >= 0).view_as(topk_weights)
        row_index = row_index.clamp(min=0)
    return torch_npu.npu_moe_token_unpermute(down, row_index, probs=topk_weights)


register_kernel(
    EXPERTS,
    name=f"{EXPERTS.name}.ascend_packed",
    solution="ascend",
    capability=TRITON_ASCEND,
    signatures=(accepts(hidden="bfloat16", weight="mxfp4"),),
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY},
    # above plain operators; a format that is expanded in each step is none that a machine keeps (`keeps_format`)
    priority=Priority.PORTABLE + 1,
    prepare=prepare_packed,
    function=f"{__name__}:expert_mlp",
    summary="As ascend, from weights that stay in MXFP4: the touched experts are expanded before each product.",
)
