"""The contract of npu_fused_infer_attention_score for a paged key and value cache."""

from __future__ import annotations

import torch
from ascend_emulator.ops.fia_call import TND_LAYOUTS, FiaCall
from ascend_emulator.ops.table import name_of, shape
from ascend_emulator.rules import Call


def check_pages(call: Call, fia: FiaCall, kv_lens: list[int], kv_heads: int, head_dim: int, batch: int) -> None:
    """Checks the cache, its block table and the lengths read through it."""
    key, value, table, block = fia.key, fia.value, fia.block_table, fia.block_size
    tnd = fia.layout in TND_LAYOUTS
    if tnd and call.context.is_8_3:
        call.require(
            block % 128 == 0 and 128 <= block <= 1024,
            29,
            f"block size({block}) should be a multiple of 128, and can't greater than 1024 when PA enable",
        )
    else:
        limit = 1024 if tnd else 512
        call.require(
            block % 16 == 0 and 16 <= block <= limit,
            29,
            f"block size({block}) should be a multiple of 16, and can't greater than {limit} when PA enable",
        )
    call.require(table.numel() > 0, 28, f"blockTable can't be empty when PA enable, got shape {shape(table)}")
    call.require(
        table.dtype == torch.int32, 28, f"blockTable only support int32 when PA enable, got {name_of(table.dtype)}"
    )
    call.require(table.dim() == 2, 28, f"the dim of block table must be 2 when PA enable, got shape {shape(table)}")
    needed = [-(-n // block) for n in kv_lens]
    call.require(
        sum(needed) > 0, 32, f"no block is needed: every actualSeqLenKV is 0 ({len(kv_lens)} requests) when PA enable"
    )
    call.require(
        key.dim() == value.dim() and key.dim() in (3, 4, 5),
        30,
        f"the dim of key and value must be equal and in [3, 4, 5] when PA enable, got key {shape(key)}, value "
        f"{shape(value)}",
    )
    if not tnd:
        call.require(
            key.dim() == 3 or fia.layout == "BNSD",
            36,
            f"layout {fia.layout} takes a key of [n, block, N*D] when PA enable, got {shape(key)}",
        )
    inner = {3: [block, kv_heads * head_dim], 4: [kv_heads, block, head_dim]}.get(
        key.dim(), [kv_heads, head_dim // 16, block, 16]
    )
    call.require(
        list(key.shape[1:]) == inner and (list(value.shape) == list(key.shape) or fia.query.size(-1) == 192),
        30,
        f"the dim of key {shape(key)} (value {shape(value)}) is invalid, which should be "
        f"[>={sum(needed)}, {', '.join(map(str, inner))}] when PA enable",
    )
    if key.dim() == 3:
        call.require(
            key.size(2) <= 65535,
            31,
            f"layout of key/value is BSH, the h of key/value {key.size(2)} should not > 65535 when PA enable",
        )
    call.require(
        table.size(0) == batch,
        28,
        f"block table shape should be [{batch}, >={max(needed)}], now is {shape(table)} when PA enable",
    )
    call.require(
        max(needed) <= table.size(1),
        17,
        f"actualSeqLenKV is per request when PA enable: block table shape should be [{batch}, >={max(needed)}] for a "
        f"length of {max(kv_lens)}, now is {shape(table)}",
    )
    call.require(
        key.size(0) >= sum(needed),
        32,
        f"the first dim of key({key.size(0)}) should not less than valid block num({sum(needed)}) when PA enable",
    )
