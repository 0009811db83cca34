"""The contract of npu_fused_infer_attention_score, in the order of a real call's checks on CANN 8.3.RC1.

torch_npu's binding allocates the outputs; aclnn checks pointers and dtypes; the fused operator's tiling checks sink and
layout; the prompt operator's tiling checks precision, mask dtype, lengths, shapes, pages and sparse mode. From CANN 8.5
on another kernel (FiaTilingNonQuant) takes the call; `Call.context` selects its differences.
"""

from __future__ import annotations

import torch
from ascend_emulator.ops.fia_call import (
    BATCH_LAYOUTS,
    COMPRESSED_MODES,
    TND_LAYOUTS,
    FiaCall,
    Plan,
    check_band,
    check_mask_shape,
    host_lengths,
    strided,
)
from ascend_emulator.ops.fia_packed import check_packed
from ascend_emulator.ops.fia_pages import check_pages
from ascend_emulator.ops.table import name_of, shape
from ascend_emulator.rules import Call, Layer


def check(call: Call, fia: FiaCall, *, for_workspace: bool = False) -> Plan:
    """Returns the call as a plan. Raises ContractError for the first broken rule."""
    qlen = host_lengths(call, fia.qlen, "actual_seq_qlen")
    kvlen = host_lengths(call, fia.kvlen, "actual_seq_kvlen")
    _check_binding(call, fia)
    _check_parameters(call, fia)
    _check_sink_layout(call, fia)
    _check_precision_and_mask_type(call, fia)
    if fia.layout in TND_LAYOUTS:
        if for_workspace and call.context.is_8_3 and fia.query.size(-1) != 512:
            call.require(
                call.context.tnd_max_workspace,
                37,
                f"When layout is {fia.layout}, not support tiling_schedule_optimize = True or config mode is "
                "reduce-overhead (the workspace query passes sequence lengths without data; D is "
                f"{fia.query.size(-1)})",
            )
        return check_packed(call, fia, qlen, kvlen)
    return _check_batched(call, fia, qlen, kvlen)


def _check_binding(call: Call, fia: FiaCall) -> None:
    if fia.layout == "TND" and fia.paged and fia.value.dim() == 3:
        call.require(
            fia.kv_heads != 0,
            10,
            f"num_key_value_heads is 0 and the paged value is {shape(fia.value)}: the head size of the output is "
            "value.size(2) / num_key_value_heads, an integer division by zero",
            Layer.BINDING,
        )
    if fia.unmodelled:
        call.reject(None, f"not supported on a 910B: {sorted(fia.unmodelled)}", Layer.PARAMETER)


def _check_parameters(call: Call, fia: FiaCall) -> None:
    for name, tensor in strided(fia).items():
        what = f"{name} {shape(tensor)} with strides {list(tensor.stride())}"
        if call.context.cann == "9.1" and name != "query":
            call.reject(35, f"{what} should be contiguous", Layer.PARAMETER)
        call.note(35, f"{what} is copied whole in every call, {tensor.numel() * tensor.element_size()} bytes")
    if fia.sink is not None and not (fia.sink.dtype == torch.float16 and call.holds(93)):
        call.require(
            call.context.stands_for(fia.sink.dtype, torch.bfloat16),
            4,
            f"learnable_sink dtype should be bfloat16, got {name_of(fia.sink.dtype)}",
            Layer.PARAMETER,
        )
    call.require(
        fia.layout in TND_LAYOUTS + BATCH_LAYOUTS,
        None,
        f"inputlayout({fia.layout}) only support {', '.join(BATCH_LAYOUTS + TND_LAYOUTS)}",
    )


def _check_sink_layout(call: Call, fia: FiaCall) -> None:
    if fia.sink is None:
        return
    call.require(
        fia.layout in TND_LAYOUTS,
        1,
        f"Only layout TND/NTD_TND and valueD = 128/64 supported learnable_sink, but actual layout is {fia.layout}",
    )


def _check_precision_and_mask_type(call: Call, fia: FiaCall) -> None:
    if call.context.is_8_3:
        call.require(
            fia.inner_precise != 4,
            40,
            "not support APPROXIMATE_COMPUTATION when curShortSocName is Atlas A2: inner_precise should be 0 to 3, "
            "got 4",
        )
        if not 0 <= fia.inner_precise <= 4:
            call.note(40, f"innerPrecise [{fia.inner_precise}] should be 0,1,2,3 please check; its low bits are used")
    else:
        call.require(
            0 <= fia.inner_precise <= (3 if fia.sink is None else 0),
            40,
            f"inner_precise should be {'0 to 3' if fia.sink is None else '0 with a learnable_sink'}, "
            f"got {fia.inner_precise}",
        )
    if fia.layout in TND_LAYOUTS:
        call.require(
            fia.pse_shift is None,
            34,
            f"When Layout is TND, not support PSE: pse_shift should be None, got {shape(fia.pse_shift)}",
        )
        given = sorted(name for name, tensor in fia.quantisation.items() if tensor is not None)
        call.require(not given, 34, f"When Layout is TND, quantisation is not supported, got {given}")
        int8 = [n for n in ("query", "key", "value") if getattr(fia, n).dtype == torch.int8]
        call.require(not int8, 34, f"When Layout is TND, not support int8, got it for {int8}")
    if fia.mask is not None and (fia.sparse_mode in COMPRESSED_MODES or fia.query.dtype == torch.bfloat16):
        call.require(
            fia.mask.dtype in (torch.bool, torch.int8, torch.uint8),
            23,
            f"invalid maskType dtype[{name_of(fia.mask.dtype)}], maskType should be bool, int8 or uint8",
        )


def _check_batched(call: Call, fia: FiaCall, qlen: list[int] | None, kvlen: list[int] | None) -> Plan:
    """BSH, BSND and BNSD, as in vllm-ascend's window decode (version 1, one query per request, paged)."""
    query = fia.query
    rank = 3 if fia.layout == "BSH" else 4
    call.require(query.dim() == rank, 8, f"Layout is {fia.layout}, queryDims must be {rank}! but got {shape(query)}")
    batch = query.size(0)
    rows = query.size(2 if fia.layout == "BNSD" else 1)
    kv_heads = fia.kv_heads or fia.heads
    if fia.layout != "BSH":
        found = query.size(1 if fia.layout == "BNSD" else 2)
        call.require(found == fia.heads, 9, f"queryN({found}) should equal num_heads({fia.heads})")
    call.require(
        fia.heads > 0 and fia.heads % kv_heads == 0 and fia.heads // kv_heads <= 64,
        9,
        f"num_heads({fia.heads}) should be a multiple of num_key_value_heads({kv_heads}), at most 64 times",
    )
    call.require(
        fia.layout != "BSH" or query.size(2) % fia.heads == 0,
        9,
        f"H({query.size(-1)}) is no multiple of {fia.heads} heads",
    )
    head_dim = query.size(-1) // (fia.heads if fia.layout == "BSH" else 1)
    dtypes = {query.dtype, fia.key.dtype, fia.value.dtype}
    call.require(
        len(dtypes) == 1 and (query.dtype == torch.float16 or call.context.stands_for(query.dtype, torch.bfloat16)),
        None,
        f"query, key and value should all be float16 or bfloat16, got {sorted(map(name_of, dtypes))}",
    )
    given = sorted(name for name, tensor in fia.quantisation.items() if tensor is not None)
    if given or fia.pse_shift is not None or fia.query_rope is not None:
        call.reject(None, f"the emulator has no quantisation, pse_shift or rope for layout {fia.layout}: {given}")
    for name, lengths in (("actual_seq_lengths", qlen), ("actual_seq_lengths_kv", kvlen)):
        call.require(
            lengths is None or len(lengths) in (1, batch),
            13,
            f"{name} has {len(lengths or ())} entries, batch is {batch}",
        )
    call.require(not fia.paged or kvlen, 11, "actual seq length kv can't be null when blockTable is not null")
    call.require(
        fia.sparse_mode in (0, 1, 2, 3, 4),
        None,
        f"sparse_mode should be 0 to 4 for {fia.layout}, got {fia.sparse_mode}",
    )
    keys = None if fia.paged else fia.key.size(2 if fia.layout == "BNSD" else 1)
    q_lens = _spread(qlen, batch, rows)
    kv_lens = _spread(kvlen, batch, keys or 0)
    call.require(min(q_lens + kv_lens, default=0) >= 0, 14, f"lengths must be >= 0, got {q_lens} and {kv_lens}")
    if fia.paged:
        check_pages(call, fia, kv_lens, kv_heads, head_dim, batch)
    check_mask_shape(call, fia)
    if fia.sparse_mode == 4 and rows > 1:
        check_band(call, fia.pre_tokens, fia.next_tokens, q_lens, kv_lens)
    return Plan(
        call=fia,
        requests=tuple((b, q_lens[b], kv_lens[b]) for b in range(batch)),
        heads=fia.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        out_shape=tuple(query.shape),
        lse_shape=(batch, fia.heads, rows, 1),
    )


def _spread(lengths: list[int] | None, batch: int, default: int) -> list[int]:
    if not lengths:
        return [default] * batch
    return list(lengths) if len(lengths) == batch else lengths * batch
