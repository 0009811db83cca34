"""npu_fused_infer_attention_score, versions 1 and 2: plain, `.out` with a caller's workspace, and the workspace query.

Schemas as in torch_npu 2.7.1, whose `.out` takes its two outputs as one list.
"""

from __future__ import annotations

from typing import Any

import torch
from ascend_emulator.ops import fia_defects, fia_kernel, fia_workspace
from ascend_emulator.ops.fia_call import FiaCall, Plan
from ascend_emulator.ops.fia_contract import check
from ascend_emulator.ops.table import Arguments, kernel, poison_, poisoned, shape
from ascend_emulator.rules import Call, Layer

Pair = tuple[torch.Tensor, torch.Tensor]

V1 = "npu_fused_infer_attention_score"
V2 = f"{V1}_v2"
_ACLNN_V1 = "aclnnFusedInferAttentionScoreV3"
_ACLNN_V2 = "aclnnFusedInferAttentionScoreV4"
_QUANTISED = ("dequant_", "quant_", "antiquant_", "key_antiquant_", "value_antiquant_", "key_rope_antiquant_")
_V2_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? "
    "pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_kvlen=None, Tensor? "
    "block_table=None, Tensor? dequant_scale_query=None, Tensor? dequant_scale_key=None, Tensor? "
    "dequant_offset_key=None, Tensor? dequant_scale_value=None, Tensor? dequant_offset_value=None, Tensor? "
    "dequant_scale_key_rope=None, Tensor? quant_scale_out=None, Tensor? quant_offset_out=None, Tensor? "
    "learnable_sink=None, int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, int "
    "pre_tokens=2147483647, int next_tokens=2147483647, "
    'str input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0, '
    "int value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None, "
    "int? key_dtype=None, int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None, "
    "int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None, "
    "int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None"
)
_V1_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
    "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, Tensor? dequant_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? key_antiquant_scale=None, "
    "Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, Tensor? value_antiquant_offset=None, "
    "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
    "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, "
    "float scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
    "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, int antiquant_mode=0, "
    "int key_antiquant_mode=0, int value_antiquant_mode=0, bool softmax_lse_flag=False"
)
_OUT = ", Tensor? workspace=None, Tensor[] out) -> (Tensor, Tensor)"
_LENGTHS_V2 = ("actual_seq_qlen", "actual_seq_kvlen")
_NO_SINK = {"learnable_sink": 2}
_LENGTHS_V1 = ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len")


def _of(a: Arguments, **own: Any) -> FiaCall:
    """own: arguments that only one version has, or that the versions name differently."""
    return FiaCall(
        query=a.query,
        key=a.key,
        value=a.value,
        mask=a.atten_mask,
        block_table=a.block_table,
        kv_heads=a.num_key_value_heads,
        pre_tokens=a.pre_tokens,
        next_tokens=a.next_tokens,
        layout=a.input_layout,
        sparse_mode=a.sparse_mode,
        block_size=a.block_size,
        inner_precise=a.inner_precise,
        pse_shift=a.pse_shift,
        query_rope=a.query_rope,
        key_rope=a.key_rope,
        quantisation={
            name: value for name, value in vars(a).items() if name.startswith(_QUANTISED) and not name.endswith("_mode")
        },
        **own,
    )


def from_v2(a: Arguments) -> FiaCall:
    return _of(
        a,
        version=2,
        qlen=a.actual_seq_qlen,
        kvlen=a.actual_seq_kvlen,
        sink=a.learnable_sink,
        heads=a.num_query_heads,
        scale=a.softmax_scale,
        want_lse=a.return_softmax_lse,
    )


def from_v1(a: Arguments) -> FiaCall:
    return _of(
        a,
        version=1,
        qlen=a.actual_seq_lengths,
        kvlen=a.actual_seq_lengths_kv,
        sink=None,
        heads=a.num_heads,
        scale=a.scale,
        want_lse=a.softmax_lse_flag,
        unmodelled={
            name: value
            for name, value in vars(a).items()
            if value is not None and ("padding_size" in name or "shared_prefix" in name)
        },
    )


def _compute(call: Call, fia: FiaCall) -> Pair:
    plan = check(call, fia)
    out, lse = fia_kernel.outputs(plan)
    if call.context.execute and not _unknown_kernel(call, plan):
        fia_kernel.run(call, plan, out, lse)
    return out, lse


def _compute_into(call: Call, fia: FiaCall, workspace: torch.Tensor | None, out: list[torch.Tensor]) -> Pair:
    call.require(
        len(out) == 2, 39, f"out should be [attention_out, softmax_lse], got {len(out)} tensors", Layer.BINDING
    )
    plan = check(call, fia)
    attention_out, lse = out
    fia_kernel.check_out(call, fia, plan, attention_out, lse)
    undefined = _too_small(call, plan, workspace) or _unknown_kernel(call, plan)
    if call.context.execute:
        fia_kernel.run(call, plan, attention_out, lse)
        if undefined:
            poison_(attention_out)
        if fia_defects.reads_unset(call.context, workspace):
            attention_out.fill_(1.0)
    return attention_out, lse


def _unknown_kernel(call: Call, plan: Plan) -> bool:
    """True if the sink sends this call to the kernel "split fuse", which the emulator lacks [R93]."""
    fia = plan.call
    if fia.sink is None or not call.holds(93):
        return False
    other = not call.context.stands_for(fia.sink.dtype, torch.bfloat16) or plan.head_dim != 64
    if other:
        call.undefined(
            93,
            f"learnable_sink of {fia.sink.dtype} with head size {plan.head_dim} goes to the kernel split fuse, "
            "expected bfloat16 and 64",
        )
    return other


def _too_small(call: Call, plan: Plan, workspace: torch.Tensor | None) -> bool:
    if workspace is None:
        return False
    size, needed = workspace.numel() * workspace.element_size(), fia_workspace.needed(call, plan)
    if size < needed:
        call.undefined(38, f"workspace {shape(workspace)} has {size} bytes, expected at least {needed}")
    return size < needed


def _max_workspace(call: Call, fia: FiaCall) -> torch.Tensor:
    """`workspace_size` elements (not bytes) of the query's dtype, unwritten."""
    plan = check(call, fia, for_workspace=True)
    size = fia_workspace.needed(call, plan) if call.context.is_8_3 else fia_workspace.largest(plan)
    return torch.empty(size, dtype=fia.query.dtype, device=fia.query.device)


@kernel(f"npu::{V2}({_V2_ARGUMENTS}) -> (Tensor, Tensor)", host=_LENGTHS_V2, bundle=True)
def fused_infer_attention_score_v2(arguments: Arguments) -> Pair:
    """(attention_out, softmax_lse); the second is empty unless return_softmax_lse."""
    return _compute(Call.of(V2, _ACLNN_V2), from_v2(arguments))


@kernel(f"npu::{V2}.out({_V2_ARGUMENTS}{_OUT}", host=_LENGTHS_V2, bundle=True)
def fused_infer_attention_score_v2_out(arguments: Arguments) -> Pair:
    return _compute_into(Call.of(f"{V2}.out", _ACLNN_V2), from_v2(arguments), arguments.workspace, arguments.out)


@kernel(f"npu::_{V2}_get_max_workspace({_V2_ARGUMENTS}) -> Tensor", host=_LENGTHS_V2, bundle=True)
def fused_infer_attention_score_v2_get_max_workspace(arguments: Arguments) -> torch.Tensor:
    return _max_workspace(Call.of(f"_{V2}_get_max_workspace", _ACLNN_V2), from_v2(arguments))


@kernel(f"npu::{V1}({_V1_ARGUMENTS}) -> (Tensor, Tensor)", host=_LENGTHS_V1, bundle=True, absent=_NO_SINK)
def fused_infer_attention_score(arguments: Arguments) -> Pair:
    return _compute(Call.of(V1, _ACLNN_V1), from_v1(arguments))


@kernel(f"npu::{V1}.out({_V1_ARGUMENTS}{_OUT}", host=_LENGTHS_V1, bundle=True, absent=_NO_SINK)
def fused_infer_attention_score_out(arguments: Arguments) -> Pair:
    return _compute_into(Call.of(f"{V1}.out", _ACLNN_V1), from_v1(arguments), arguments.workspace, arguments.out)


@kernel(f"npu::_{V1}_get_max_workspace({_V1_ARGUMENTS}) -> Tensor", host=_LENGTHS_V1, bundle=True, absent=_NO_SINK)
def fused_infer_attention_score_get_max_workspace(arguments: Arguments) -> torch.Tensor:
    return _max_workspace(Call.of(f"_{V1}_get_max_workspace", _ACLNN_V1), from_v1(arguments))


@kernel(
    f"npu::_{V2}_infer_output(Tensor query, Tensor value, *, int? query_dtype=None, int? value_dtype=None, "
    'str input_layout="BSH", Tensor? quant_scale_out=None, Tensor? block_table=None, int num_query_heads=1, '
    "int num_key_value_heads=0, bool return_softmax_lse=False, Tensor? query_rope=None, int? out_dtype=None) "
    "-> (Tensor, Tensor)",
    bundle=True,
)
def fused_infer_attention_score_v2_infer_output(a: Arguments) -> Pair:
    """torch-npu 2.10: allocates a call's outputs for its updates of graphs."""
    call = Call.of(f"_{V2}_infer_output", _ACLNN_V2)
    call.require(a.input_layout == "TND" and a.quant_scale_out is None, None, f"only TND is emulated: {a.input_layout}")
    tokens, heads = a.query.shape[:2]
    kv_heads = a.num_key_value_heads or heads
    width = a.value.size(-1) if a.block_table is None or a.value.dim() != 3 else a.value.size(2) // kv_heads
    lse = (tokens, heads, 1) if a.return_softmax_lse else (0,)
    return poisoned((tokens, heads, width), a.query), poisoned(lse, a.query, torch.float32)
