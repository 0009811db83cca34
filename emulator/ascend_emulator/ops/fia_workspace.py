"""Workspace bytes of an attention call, for each of the two kernels behind it.

CANN 8.3 (prompt_flash_attention_tiling.cpp): per core three tiles of scores and four of values. From 8.5 on
(fia_tiling_nonquant.cpp, CalcWorkspaceSize; the same text in v8.5.0, v9.0.0, v9.0.1 and branch 9.1.0): two tiles of
scores, in float32 and in the query's type, and two times two of values; plus two partial results per core if the keys
of a row are split over cores. The lengths decide that, so a graph whose lengths change needs `largest`
(CalcMaxWorkspaceSize, which the workspace query answers).
"""

from __future__ import annotations

from ascend_emulator.ops.fia_call import Plan
from ascend_emulator.ops.fia_mask import Tiling
from ascend_emulator.rules import Call

CORES, RESERVE = 20, 16 << 20  # of a 910B3; reserved for CANN's own library
TILE = 512  # rows, and keys
FLOAT32, BFLOAT16 = 4, 2
BLOCK = 32  # bytes of a row's maximum, and of its sum


def needed(call: Call, plan: Plan) -> int:
    """Bytes that this call takes on this CANN."""
    q_lens, kv_lens = ([max(r[i], 1) for r in plan.requests] for i in (1, 2))
    group = plan.heads // plan.kv_heads
    if call.context.is_8_3:
        tiling = Tiling.of(q_lens, kv_lens, group, plan.call.want_lse)
        return CORES * FLOAT32 * tiling.rows * (3 * tiling.keys + 4 * plan.head_dim) + RESERVE
    block = plan.call.block_size or 1
    keys = min(TILE, -(-max(kv_lens) // block) * block)
    return _by_tiles(min(TILE, group * max(q_lens)), keys, plan.head_dim, split=_may_split(plan))


def largest(plan: Plan) -> int:
    """The most bytes for a call of these shapes, from CANN 8.5 on."""
    return _by_tiles(TILE, TILE, plan.head_dim, split=True)


def _by_tiles(rows: int, keys: int, head_dim: int, *, split: bool) -> int:
    keys = -(-keys // BLOCK) * BLOCK
    core = 2 * rows * (keys * (FLOAT32 + BFLOAT16) + head_dim * 2 * FLOAT32)
    partial = 2 * TILE * (head_dim * FLOAT32 + 2 * BLOCK)
    return RESERVE + CORES * (core + split * partial)


def _may_split(plan: Plan) -> bool:
    """True if rows see keys of two tiles: the tiling may cut between them, and does if that balances the cores."""
    fia = plan.call
    for _, rows, keys in plan.requests:
        seen_from = max(keys - rows - fia.pre_tokens, 0) if fia.sparse_mode == 4 else 0
        if rows and seen_from // TILE != max(keys - 1, 0) // TILE:
            return True
    return False
