"""Bytes that operators move, if their operands do not determine them.

A paged attention reads the visible keys, not the whole cache; a grouped matmul the weights of experts with rows; a
cache write touches its slots. Each byte counts once, as with a perfect cache. Extra traffic counts too: strided
operands that are copied first (R35), weights expanded into a workspace, and operators of torch_npu that consist of
several kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from ascend_emulator.ops.fia import V1, V2, from_v1, from_v2
from ascend_emulator.ops.fia_call import TND_LAYOUTS, FiaCall, strided
from ascend_emulator.ops.table import Arguments, Traffic, measured

MASK_WINDOW = 1024  # keys around the diagonal for which a tile reads the mask


def _bytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _ints(lengths: object) -> list[int]:
    return [int(n) for n in (lengths.flatten().tolist() if isinstance(lengths, torch.Tensor) else lengths or ())]


def _attention(fia: FiaCall, written: int) -> Traffic:
    q_lens, kv_lens = _ints(fia.qlen), _ints(fia.kvlen)
    if fia.layout in TND_LAYOUTS:
        q_lens = [b - a for a, b in pairwise([0, *q_lens])]
        if not fia.paged:
            kv_lens = [b - a for a, b in pairwise([0, *kv_lens])]
    else:
        q_lens = q_lens or [1] * fia.query.size(0)
    windowed = fia.sparse_mode == 4 or (fia.layout == "BSH" and fia.paged)
    keys, mask = 0, 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=False):
        reach = q_len + fia.pre_tokens if windowed else kv_len
        keys += min(kv_len, reach)
        mask += q_len * min(kv_len, MASK_WINDOW) if fia.mask is not None else 0
    head_dim = fia.query.size(-1) // (fia.heads if fia.layout == "BSH" else 1)
    per_key = (fia.kv_heads or fia.heads) * head_dim * (fia.key.element_size() + fia.value.element_size())
    tables = 0 if not fia.paged else 4 * sum(-(-n // fia.block_size) for n in kv_lens)
    copied = strided(fia)
    read = _bytes(fia.query, fia.sink) + keys * per_key + mask + tables
    return Traffic(read + _bytes(*copied.values()), written + _bytes(*copied.values()), 1 + len(copied))


@measured(f"npu::{V2}", f"npu::{V2}.out")
def _attention_v2(a: Arguments) -> Traffic:
    return _attention(from_v2(a), _bytes(a.query))


@measured(f"npu::{V1}", f"npu::{V1}.out")
def _attention_v1(a: Arguments) -> Traffic:
    return _attention(from_v1(a), _bytes(a.query))


@measured("atb::_npu_paged_attention")
def _paged_attention(a: Arguments) -> Traffic:
    lengths = _ints(a.context_lens)
    per_key = sum(_bytes(cache) // (cache.size(0) * cache.size(1)) for cache in (a.key_cache, a.value_cache))
    tables = 4 * sum(-(-n // a.key_cache.size(1)) for n in lengths)
    return Traffic(_bytes(a.query) + sum(lengths) * per_key + tables, _bytes(a.out))


@measured("npu::npu_grouped_matmul")
def _grouped_matmul(a: Arguments) -> Traffic:
    if a.group_list is None or len(a.x) != 1 or len(a.weight) != 1:
        written = sum(x.size(0) * w.size(-1) * x.element_size() for x, w in zip(a.x, a.weight, strict=False))
        return Traffic(_bytes(*a.x, *a.weight, *(a.bias or ())), written)
    groups = _ints(a.group_list)
    counts = groups if a.group_list_type == 1 else [b - a for a, b in pairwise([0, *groups])]
    rows, used = sum(counts), sum(n > 0 for n in counts)
    experts = a.weight[0].size(0)
    per_expert = _bytes(*a.weight, *(a.bias or ())) // experts
    x = a.x[0]
    return Traffic(
        rows * x.size(1) * x.element_size() + used * per_expert + _bytes(a.group_list),
        rows * a.weight[0].size(2) * x.element_size(),
    )


@measured("atb::_npu_reshape_and_cache")
def _reshape_and_cache(a: Arguments) -> Traffic:
    kept = int((a.slot_indices >= 0).sum())
    rows = sum(_bytes(t) // max(t.size(0), 1) for t in (a.key, a.value)) * kept
    return Traffic(rows + _bytes(a.slot_indices), rows)


@measured("npu::npu_scatter_pa_kv_cache")
def _scatter_pa_kv_cache(a: Arguments) -> Traffic:
    return Traffic(_bytes(a.key, a.value, a.slot_mapping), _bytes(a.key, a.value))


@measured("atb::_npu_rotary_embedding")
def _rotary(a: Arguments) -> Traffic:
    """Two look-ups, of cosines and sines as wide as both halves, and ATB's kernel (op-plugin, RopeAtb.cpp)."""
    looked_up = 2 * a.positions.numel() * a.cos_sin_cache.size(1) * a.cos_sin_cache.element_size()
    read = _bytes(a.query, a.key) + 2 * looked_up + 2 * _bytes(a.positions)
    return Traffic(read, _bytes(a.query, a.key) + looked_up, 3)


@measured("npu::npu_moe_init_routing_v2")
def _init_routing_v2(a: Arguments) -> Traffic:
    start, end = a.active_expert_range
    active = int(((a.expert_idx >= start) & (a.expert_idx < end)).sum())
    width = a.x.size(1) * a.x.element_size()
    return Traffic(_bytes(a.x, a.expert_idx), active * width + _bytes(a.expert_idx) + 8 * (end - start))
