"""The contract of npu_fused_infer_attention_score for packed tokens (TND and NTD_TND), in the tiling's order."""

from __future__ import annotations

from itertools import pairwise

import torch
from ascend_emulator.ops.fia_call import FiaCall, Plan, check_band, check_mask_shape
from ascend_emulator.ops.fia_pages import check_pages
from ascend_emulator.ops.table import name_of, shape
from ascend_emulator.rules import Call

MAX_TOKENS = 1 << 20
MAX_REQUESTS = 4096
SINK_SLACK = 32


def check_packed(call: Call, fia: FiaCall, qlen: list[int] | None, kvlen: list[int] | None) -> Plan:
    layout, query, key, value = fia.layout, fia.query, fia.key, fia.value
    for name, lengths in (("actualSequenceLengthQ", qlen), ("actualSequenceLengthKV", kvlen)):
        call.require(lengths is not None, 11, f"When layout is {layout}, {name} is required, but now is nullptr!")
        call.require(lengths, 11, f"When layout is {layout}, {name} is required, but the number of element in it is 0!")
    if call.context.is_8_3:
        call.require(
            len(qlen) <= MAX_REQUESTS and len(kvlen) <= MAX_REQUESTS,
            13,
            f"Array length of the query's actual sequence lengths({len(qlen)}) and the key/value's ({len(kvlen)}) must "
            f"be less than or equal to {MAX_REQUESTS} when input layout is {layout}",
        )
    ranks = f"query {shape(query)}, key {shape(key)}, value {shape(value)}"
    call.require(query.dim() == 3, 8, f"When layout is {layout}, querDim({query.dim()}) must be 3: got {ranks}")
    same_rank = key.dim() == value.dim()
    if fia.paged:
        legal = same_rank and key.dim() in (3, 4, 5)
        call.require(legal, 30, f"When layout is {layout} and PA enable, keyDim and valueDim in [3, 4, 5]: got {ranks}")
    else:
        legal = same_rank and key.dim() == 3
        call.require(legal, 8, f"When layout is {layout}, keyDim({key.dim()}) valueDim must be 3: got {ranks}")
    tokens = query.size(0) if layout == "TND" else query.size(1)
    query_heads = query.size(1) if layout == "TND" else query.size(0)
    call.require(
        qlen[-1] == tokens,
        15,
        f"When layout is {layout}, queryT({tokens}) must be equal to the last element of "
        f"actualSequenceLengthQ({qlen[-1]})",
    )
    key_tokens = _unpaged_tokens(fia, key)
    if not fia.paged:
        call.require(
            kvlen[-1] == key_tokens == _unpaged_tokens(fia, value),
            16,
            f"When layout is {layout} and PA not enabled, keyT({key_tokens}) and valueT({_unpaged_tokens(fia, value)}) "
            f"must be equal to the last element of actualSeqenceLengthKV({kvlen[-1]})",
        )
    call.require(
        max(tokens, 0 if fia.paged else key_tokens) <= MAX_TOKENS,
        18,
        f"When layout is {layout}, T cannot be greater than 1048576(1M), queryT={tokens}, keyT={key_tokens}",
    )
    kv_heads = fia.kv_heads or fia.heads
    _check_heads(call, fia, query_heads, kv_heads)
    head_dim, key_dim, value_dim = query.size(-1), _head_dim(fia, key, kv_heads), _head_dim(fia, value, kv_heads)
    _check_rope(call, fia, head_dim)
    same = head_dim == key_dim == value_dim and value_dim in (64, 128)
    wide = head_dim == key_dim == 192 and value_dim in (128, 192)
    call.require(
        same or wide,
        7,
        f"When layout is {layout}, queryD({head_dim}), keyD({key_dim}) and valueD({value_dim}) must be same equal "
        "192/128/64, or queryD and keyD equal 192 and valueD equal 128",
    )
    call.require(
        fia.heads == kv_heads or value_dim != 192,
        7,
        f"When layout is {layout}, When G({fia.heads // max(kv_heads, 1)}) not 1, valueD(192) should not be 192",
    )
    _check_sink(call, fia, query_heads, value_dim)
    _check_dtypes(call, fia)
    _check_lengths(call, fia, qlen, kvlen)
    q_lens = [b - a for a, b in pairwise([0, *qlen])]
    kv_lens = list(kvlen) if fia.paged else [b - a for a, b in pairwise([0, *kvlen])]
    if fia.paged:
        check_pages(call, fia, kv_lens, kv_heads, head_dim, len(qlen))
    check_mask_shape(call, fia)
    _check_sparse(call, fia, q_lens, kv_lens, value_dim)
    return Plan(
        call=fia,
        requests=tuple(zip((0, *qlen), q_lens, kv_lens, strict=False)),
        heads=fia.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        out_shape=(tokens, fia.heads, value_dim),
        lse_shape=(tokens, fia.heads, 1),
    )


def _unpaged_tokens(fia: FiaCall, tensor: torch.Tensor) -> int:
    return tensor.size(0) if fia.layout == "TND" else tensor.size(1)


def _head_dim(fia: FiaCall, tensor: torch.Tensor, kv_heads: int) -> int:
    if not fia.paged or tensor.dim() == 4:
        return tensor.size(-1)
    if tensor.dim() == 3:
        return tensor.size(2) // kv_heads
    return tensor.size(2) * tensor.size(4) if tensor.dim() == 5 else tensor.size(-1)


def _check_heads(call: Call, fia: FiaCall, query_heads: int, kv_heads: int) -> None:
    if not fia.paged:
        found = [t.size(1) if fia.layout == "TND" else t.size(0) for t in (fia.key, fia.value)]
        call.require(
            found[0] == found[1] == kv_heads,
            9,
            f"When layout is {fia.layout}, the values of keyN({found[0]}), valueN({found[1]}) must be equal, and "
            f"num_key_value_heads is {kv_heads}",
        )
    call.require(
        query_heads == fia.heads,
        9,
        f"When layout is {fia.layout}, the values of queryN({query_heads}) not equal to Attr the query's heads "
        f"num({fia.heads})",
    )
    call.require(
        kv_heads > 0 and fia.heads % kv_heads == 0,
        9,
        f"When layout is {fia.layout}, the values of queryN({fia.heads}) should be a multiple of keyN({kv_heads})",
    )
    call.require(fia.heads // kv_heads <= 64, 9, f"queryN / keyN should be at most 64, got {fia.heads} / {kv_heads}")


def _check_rope(call: Call, fia: FiaCall, head_dim: int) -> None:
    if fia.query_rope is None and fia.key_rope is None:
        return
    call.require(
        fia.query_rope is not None and fia.key_rope is not None,
        34,
        "queryRope and keyRope should be both null or exist, got "
        f"queryRope {shape(fia.query_rope)}, keyRope {shape(fia.key_rope)}",
    )
    call.require(
        head_dim == 128 and fia.query_rope.size(-1) == 64 and fia.key_rope.size(-1) == 64,
        34,
        f"queryRopeD({fia.query_rope.size(-1)})/keyRopeD({fia.key_rope.size(-1)}) must be 64, queryD({head_dim}) must "
        "be 128!",
    )


def _check_sink(call: Call, fia: FiaCall, query_heads: int, value_dim: int) -> None:
    if fia.sink is None or fia.sink.numel() == 0:  # an empty sink counts as absent from here on
        return
    call.require(fia.sink.dim() == 1, 3, f"learnable_sink enable, learnable_sink dim({fia.sink.dim()}) must be 1!")
    call.require(
        fia.sink.numel() == query_heads,
        3,
        f"learnable_sink enable, sinkN shape({fia.sink.numel()}) must be same equal queryN({query_heads})!",
    )
    legal = value_dim in (64, 128) if call.context.is_8_3 else value_dim <= 128
    call.require(legal, 5, f"When Layout is TND, learnable_sink only support valueD equal 64/128, got {value_dim}")
    if call.holds(92) and call.context.bytes_behind(fia.sink) < SINK_SLACK * fia.sink.element_size():
        call.undefined(
            92,
            f"learnable_sink {shape(fia.sink)} ends with its memory, and the kernel reads 16 elements from each key "
            f"head's first on: expected {SINK_SLACK} elements behind it (the result is right where they are mapped)",
        )


def _check_dtypes(call: Call, fia: FiaCall) -> None:
    dtypes = [fia.query.dtype, fia.key.dtype, fia.value.dtype]
    names = "/".join(map(name_of, dtypes))
    if call.context.is_8_3:
        call.require(
            all(call.context.stands_for(d, torch.bfloat16) for d in dtypes),
            6,
            f"When layout is {fia.layout}, inputDataType should be bf16, got query/key/value {names}",
        )
    else:
        wanted = dtypes[0] == torch.float16 or call.context.stands_for(dtypes[0], torch.bfloat16)
        call.require(wanted, 6, f"query should be float16 or bfloat16, got {names}")
    call.require(len(set(dtypes)) == 1, 6, f"query, key and value should share one dtype, got {names}")


def _check_lengths(call: Call, fia: FiaCall, qlen: list[int], kvlen: list[int]) -> None:
    call.require(
        len(qlen) == len(kvlen),
        13,
        f"When layout is {fia.layout}, the length of actualSequenceLengthQ({len(qlen)}) and "
        f"actualSequenceLengthKV({len(kvlen)}) must be equal",
    )
    for i, (q, kv) in enumerate(zip(qlen, kvlen, strict=True)):
        call.require(
            q >= 0 and kv >= 0,
            14,
            f"When layout is {fia.layout}, actualSequenceLengthQ[{i}]={q} and actualSequenceLengthKV[{i}]={kv} must "
            ">= 0",
        )
    for i, (before, after) in enumerate(pairwise(qlen)):
        call.require(
            after >= before,
            14,
            f"When layout is {fia.layout}, the query's actual sequence lengths must be not decreasing, but "
            f"actSeqLen[{i + 1}]={after}, actSeqLen[{i}]={before}",
        )
    if not fia.paged:
        for i, (before, after) in enumerate(pairwise(kvlen)):
            call.require(
                after >= before,
                16,
                f"When layout is {fia.layout}, the key/value's actual sequence lengths must be not decreasing, but "
                f"actSeqLenKV[{i + 1}]={after}, actSeqLenKV[{i}]={before}",
            )


def _check_sparse(call: Call, fia: FiaCall, q_lens: list[int], kv_lens: list[int], value_dim: int) -> None:
    mode, pre, next_ = fia.sparse_mode, fia.pre_tokens, fia.next_tokens
    call.require(
        mode in (0, 3, 4), 19, f"When Layout is TND, sparseMode only support 0,3 or 4, but sparseMode = {mode}"
    )
    call.require(
        mode != 0 or fia.mask is None,
        20,
        f"When Layout is TND, sparseMode = 0 not support attentionMask, got {shape(fia.mask)}",
    )
    if mode == 4:
        call.require(
            value_dim in (64, 128),
            27,
            f"When Layout is TND, sparseMode = 4 only support valueD equal 64/128, got {value_dim}",
        )
        check_band(call, pre, next_, q_lens, kv_lens)
    if mode == 3:
        for i, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
            call.require(q <= kv, 25, f"When layout is TND and sparse = 3 ,Batch[{i}], need s1[{q}] <= s2[{kv}]")
