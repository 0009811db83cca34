"""The rules for operators and graphs of an Ascend 910B, and their errors.

A rule describes calls that hardware, driver or host library refuses, leaves undefined, or runs at a cost. R81 to R91
belong to graph capture and replay; `emulator/ops` raises the others. `versions` are the CANN releases with the rule;
if they are not all, `SOURCES` gives the source. Errors read like the layer that refuses on a real machine (torch_npu's
binding, aclnn's parameter check, the operator's tiling), with the rule's number appended.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum

from ascend_emulator.context import CANN_VERSIONS, Finding, OpContext, current

ALL = CANN_VERSIONS
ONLY_8_3 = ("8.3.rc1", "8.3.rc2")
UP_TO_8_5 = (*ONLY_8_3, "8.5")
FROM_8_5_TO_9_0 = ("8.5", "9.0")
FROM_9_0 = ("9.0", "9.1")


class Kind(str, Enum):
    REJECT = "reject"
    UNDEFINED = "undefined"
    COSTLY = "costly"


@dataclass(frozen=True)
class Rule:
    number: int
    family: str
    text: str
    versions: tuple[str, ...] = ALL
    kind: Kind = Kind.REJECT

    @property
    def name(self) -> str:
        return f"R{self.number:02d}"


def _family(family: str, *rules: tuple) -> list[Rule]:
    return [Rule(number, family, text, *rest) for number, text, *rest in rules]


_UB = (ALL, Kind.UNDEFINED)

RULES: dict[int, Rule] = {
    rule.number: rule
    for rule in (
        *_family(
            "fused_infer_attention",
            (1, "A learnable sink needs the layout TND or NTD_TND."),
            (2, "Version 1 of the operator has no learnable sink."),
            (3, "The sink is one-dimensional with one value per query head."),
            (4, "The sink is bfloat16 (from CANN 9.0 on float16 is taken, too: R93)."),
            (5, "With a sink the head size is 64 or 128 (CANN 8.5: the value's at most 128).", UP_TO_8_5),
            (6, "TND takes bfloat16 query, key and value only (CANN 8.5: float16 too, never mixed)."),
            (7, "TND head sizes are all 64, all 128, or 192 with values of 128 or (ungrouped) 192.", ONLY_8_3),
            (8, "TND takes a three-dimensional query, and three-dimensional key and value when not paged."),
            (9, "Heads match num_query_heads, key and value heads agree, and the ratio is whole and at most 64."),
            (10, "A paged three-dimensional cache needs num_key_value_heads; zero divides by zero in the binding."),
            (11, "TND needs non-empty actual_seq_qlen and actual_seq_kvlen."),
            (12, "Sequence lengths are host integers; a device tensor is read element by element, a sync each."),
            (13, "Both sequence-length lists have the same length, at most 4096 entries."),
            (14, "Sequence lengths are not negative and the query's are cumulative, hence never decrease."),
            (15, "The last cumulative query length equals the query's rows."),
            (16, "Without paging the key lengths are cumulative and end at the key's rows."),
            (17, "With paging the key lengths are per request and fit into the block table's width."),
            (18, "TND takes at most 1048576 tokens.", ONLY_8_3),
            (19, "TND takes sparse_mode 0, 3 or 4."),
            (20, "TND with sparse_mode 0 takes no mask."),
            (21, "sparse_mode 3 and 4 need a mask."),
            (22, "For sparse_mode 2, 3 and 4 the mask is (2048, 2048), with leading ones at most."),
            (23, "The compressed mask is bool, int8 or uint8."),
            (24, "The compressed mask is the strict upper triangle of ones; others are read at shifted places.", *_UB),
            (25, "sparse_mode 3 needs at least as many keys as queries in each request.", ONLY_8_3),
            (26, "sparse_mode 4 needs a band: pre_tokens + next_tokens >= 0, within each request's ends."),
            (27, "sparse_mode 4 in TND needs head size 64 or 128.", ONLY_8_3),
            (28, "The block table is a non-empty int32 matrix with one row per request."),
            (29, "A TND block is a multiple of 128 up to 1024 (CANN 8.5: a multiple of 16 up to 1024)."),
            (30, "Paged key and value are both [n, block, N*D], [n, N, block, D] or [n, N, D/16, block, 16]."),
            (31, "In a three-dimensional cache N*D is at most 65535."),
            (32, "The cache has at least the blocks that the lengths need, and something must be needed."),
            (33, "Block ids lie inside the cache; nothing checks them.", *_UB),
            (34, "TND on CANN 8.3 takes no pse_shift, no quantisation, and rope only with D 128 + 64.", ONLY_8_3),
            (
                35,
                "Query, key and value are contiguous; else each call copies them. CANN 9.1 refuses key and value.",
                ALL,
                Kind.COSTLY,
            ),
            (36, "BSH and BSND take a three-dimensional paged cache only."),
            (37, "The workspace query cannot serve TND: it passes sequence lengths without data.", ONLY_8_3),
            (38, "The caller's workspace suffices, unchecked; from CANN 8.5 on its size depends on the lengths.", *_UB),
            (39, "The caller's outputs have the shape and dtype that the operator writes."),
            (40, "inner_precise is 0 to 3, and 0 with a sink from CANN 8.5 on."),
            (92, "The sink has 32 elements behind it: the kernel reads past its end.", FROM_8_5_TO_9_0, Kind.UNDEFINED),
            (93, "Only a bfloat16 sink with head size 64 takes the kernel known here.", FROM_9_0, Kind.UNDEFINED),
        ),
        *_family(
            "grouped_matmul",
            (41, "group_type must be given and be -1, 0 or 2."),
            (42, "split_item is 0 to 3, and 2 or 3 need grouping."),
            (43, "One x [M, K] and one weight [E, K, N] with as many groups as experts."),
            (44, "group_list is a one-dimensional int64 device tensor with at most 1024 groups."),
            (45, "group_list_type is 0 or 1 (2 for int8 only)."),
            (46, "Groups do not shrink, are not negative and cover at most M rows; rows beyond are not written.", *_UB),
            (47, "The bias is float32 for bfloat16 x, and x's own dtype for float16 and float32."),
            (48, "The bias of one weight is [E, N], and absent when K is split."),
            (49, "x and weight share one dtype in every list."),
            (50, "act_type works for per-token int8 only."),
            (51, "K and the contiguous axis are at most 65535, lists at most 128 long."),
            (53, "FRACTAL_NZ weights are aligned: 16x16 for 16-bit, 16x32 for int8, 16x64 for int4."),
            (54, "A 910B has no 8-bit or 4-bit float type."),
            (55, "While capturing, groups are never read on the host."),
            (56, "x is not transposed when M is split."),
        ),
        *_family(
            "moe_routing",
            (
                57,
                "gating_top_k_softmax, also _v2, takes 2-D or 3-D logits without NaN, k up to the experts and 1024.",
            ),
            (58, "gating_top_k takes 2-D logits without NaN, a bias per expert, 2048 experts, whole groups, renorm 0."),
            (59, "init_routing_v2 on CANN 8.3 takes few of its own defaults.", ONLY_8_3),
            (61, "permute and unpermute take no padding, k up to 512, and matching sizes."),
            (65, "Dispatch and combine take few rows, and ranks by card and CANN (ops/moe_distribute.py)."),
            (94, "The group's buffer (HCCL_BUFFSIZE) holds what dispatch may send; an A2 writes past its end."),
        ),
        *_family(
            "vector",
            (66, "npu_clipped_swiglu does not exist before torch_npu 2.7.1.post2.", ONLY_8_3),
            (67, "clipped_swiglu takes a contiguous tensor of rank 2 or more, even along dim, int64 group counts."),
            (68, "swiglu needs an even size along dim."),
            (70, "add_rms_norm takes three tensors of one dtype, equal shapes, no empty dimension, epsilon >= 0."),
            (71, "rms_norm knows five dtype pairs of x and gamma."),
            (72, "apply_rotary_pos_emb on CANN 8.3 takes head size 128 in four dimensions only.", ONLY_8_3),
            (73, "rotary_mul takes four dimensions, an even head size below 896, and listed broadcasts."),
            (75, "_npu_rotary_embedding keeps its process's first table, and copies a length to the device."),
            (76, "Cache writes take contiguous caches of one format and integer slots inside them."),
            (77, "FRACTAL_NZ is for aligned 16-bit or integer weights, and never through a view."),
        ),
        *_family(
            "low_bit",
            (80, "A 910B has no FP8 operator."),
        ),
        *_family(
            "graph",
            (81, "Capture needs its own stream, its own object, task queue level 0 or 1, and begin before end."),
            (82, "Nothing synchronises or copies from pageable memory while capturing."),
            (83, "Legacy operators and random numbers cannot be captured."),
            (84, "Forked streams are joined before capture ends and events are recorded before they are awaited."),
            (85, "A task group holds exactly one operator, begun and ended on one stream."),
            (86, "A task update repeats the captured operator and tensors, on another stream, before the wait."),
            (87, "Captured tensors stay alive and where they were."),
            (88, "Graphs share a budget of streams.", ONLY_8_3),
            (89, "A replay has the captured shapes."),
            (90, "torch_npu 2.7.1 does not update version 2 of the attention operator by itself.", ONLY_8_3),
            (
                91,
                "A capture takes memory on its first stream; torch_npu before 2.7.1.post4 takes others' elsewhere.",
                UP_TO_8_5,
                Kind.UNDEFINED,
            ),
        ),
    )
}

_PFA = "ops-transformer b122ed222 (8.3.RC1), prompt_flash_attention_tiling.cpp; from v8.5.0 on FiaTilingNonQuant"
# Sources for rules that hold, or differ, in some releases only.
SOURCES: dict[int, str] = {
    5: "ops-transformer v8.5.0, CheckFeatureLearnableSink; v9.0.0 asks no head size there, see 93",
    **dict.fromkeys((7, 18, 25, 27, 34), _PFA),
    35: "9.1: vllm-ascend PRs 12025 and 13461 and sglang PR 34936, which met the refusal on cards",
    37: f"{_PFA}, which answers with CalcMaxWorkspaceSize",
    38: f"{_PFA}::CalcWorkspaceSize, the same text in v8.5.0, v9.0.0, v9.0.1 and branch 9.1.0",
    59: "ops-transformer b122ed222, moe_init_routing_v3_tiling.cpp; v8.5.0 has another (e05d98c2f)",
    66: "op-plugin 7.3.0 and ops-nn v8.5.0, activation/clipped_swiglu",
    88: "CANN 8.5.0's notes of release, vllm-ascend's PR 9962: since then graphs take few streams",
    72: "ops-transformer b122ed222, apply_rotary_pos_emb_tiling.cpp; op-plugin 26.1.0 takes 64, too",
    90: "torch_npu 7.2.0 records version 1 only, 7.3.0 both",
    91: "torch_npu c86f48f9d (in 2.7.1.post4 and 2.10.0.post4): NPUEvent::block empties the queue in a capture",
    92: "ops-transformer ca4633c9b (2026-04-30, in v9.1.0-beta.2 and later, not in v9.0.1): SinkCopyIn reads G + 16",
    93: "ops-transformer 6f45a9b62 (in v9.0.0 and later), CheckSpecConditions",
}


class ContractError(RuntimeError):
    """An Ascend 910B would refuse this call, or (strict mode) leave its result undefined.

    rule: its number in RULES, or None.
    """

    def __init__(self, message: str, rule: int | None = None) -> None:
        super().__init__(message)
        self.rule = rule


class NotEmulatedError(RuntimeError):
    """A call that may be legal, but that the emulator cannot compute: it never guesses."""


class Layer(Enum):
    """The layer that refuses; it decides how the error begins."""

    BINDING = "{op}: {sentence}\n[ERROR] ERR01001 OPS invalid parameter"
    NULL = "call {aclnn} failed, error code is 161001 (ACLNN_ERR_PARAM_NULLPTR): {sentence}"
    PARAMETER = "call {aclnn} failed, error code is 161002 (ACLNN_ERR_PARAM_INVALID): {sentence}"
    TILING = "call {aclnn} failed, error code is 561002 (ACLNN_ERR_INNER_TILING_ERROR)\nEZ9999: {sentence}"
    CAPTURE = "call {aclnn} failed, error code is 107027 (stream is captured): {sentence}"
    DEVICE = "{op}: undefined on the device (hardware raises nothing here, or 507015 much later): {sentence}"


@dataclass(frozen=True)
class Call:
    """One call of one operator: its names in errors, and its context."""

    op: str
    aclnn: str
    context: OpContext

    @classmethod
    def of(cls, op: str, aclnn: str = "") -> Call:
        return cls(op, aclnn or op, current())

    def text(self, layer: Layer, sentence: str, rule: int | None) -> str:
        tail = f" [{RULES[rule].name}]" if rule is not None else ""
        return layer.value.format(op=self.op, aclnn=self.aclnn, sentence=sentence) + tail

    def holds(self, rule: int) -> bool:
        """True if the rule holds on this CANN version."""
        return self.context.cann in RULES[rule].versions

    def reject(self, rule: int | None, sentence: str, layer: Layer = Layer.TILING) -> None:
        """Raises if the rule holds on this CANN version. The sentence names the expected and the actual value."""
        if rule is None or self.holds(rule):
            raise ContractError(self.text(layer, sentence, rule), rule)

    def require(self, condition: object, rule: int | None, sentence: str, layer: Layer = Layer.TILING) -> None:
        if not condition:
            self.reject(rule, sentence, layer)

    def undefined(self, rule: int, sentence: str) -> None:
        """Raises in strict mode; otherwise records a finding, and the caller poisons the undefined outputs."""
        if self.context.strict:
            raise ContractError(self.text(Layer.DEVICE, sentence, rule), rule)
        self.note(rule, sentence)

    def note(self, rule: int, sentence: str) -> None:
        """Warns where a real machine stays silent. Python shows each warning once."""
        self.context.findings.append(Finding(rule, self.op, sentence))
        warnings.warn(f"{self.op}: {sentence} [{RULES[rule].name}]", RuntimeWarning, stacklevel=2)
