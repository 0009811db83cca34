"""The attention operators of the ATB library that stock vllm-ascend 0.11 uses: causal, no sink, no window."""

from __future__ import annotations

import torch
from ascend_emulator.ops.fia_kernel import attend
from ascend_emulator.ops.fia_mask import band
from ascend_emulator.ops.table import Arguments, kernel, name_of, shape
from ascend_emulator.rules import Call, Layer

WORKSPACE_BYTES = 1 << 20


def _check(call: Call, query: torch.Tensor, out: torch.Tensor, heads: int, kv_heads: int) -> None:
    call.require(
        out.is_contiguous(),
        None,
        f"at_tensor is not contiguous: out {shape(out)} with strides {list(out.stride())}",
        Layer.BINDING,
    )
    call.require(
        out.numel() == query.numel() and out.dtype == query.dtype,
        None,
        f"out should be like query, {name_of(query.dtype)} {shape(query)}, got {name_of(out.dtype)} {shape(out)}",
    )
    call.require(
        heads > 0 and kv_heads > 0 and heads % kv_heads == 0, None, f"{heads} heads are no multiple of {kv_heads}"
    )


def _check_pages(
    call: Call, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
) -> None:
    for name, cache in (("key_cache", key), ("value_cache", value)):
        call.require(
            cache.is_contiguous() and cache.dim() == 4,
            None,
            f"{name} should be contiguous [n, block, N, D], got {shape(cache)} with strides {list(cache.stride())}",
            Layer.BINDING,
        )
    for name, tensor in (("block_table", table), ("context_lens", lengths)):
        call.require(tensor.dtype == torch.int32, None, f"{name} should be int32, got {name_of(tensor.dtype)}")


def _pages(call: Call, cache: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    block = cache.size(1)
    blocks = row[: -(-length // block)].long()
    call.require(
        blocks.numel() * block >= length, None, f"a length of {length} needs more blocks than {row.numel()} of {block}"
    )
    if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < cache.size(0):
        call.undefined(33, f"blocks {blocks.tolist()} should be 0 to {cache.size(0) - 1}")
        blocks = blocks.clamp(0, cache.size(0) - 1)
    return cache[blocks].reshape(-1, *cache.shape[2:])[:length]


_PAGED = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, int num_heads, float scale_value, "
    "Tensor block_table, Tensor context_lens, Tensor(a!) out"
)


def _paged_call(op: str, a: Arguments) -> Call:
    call = Call.of(op, "PagedAttentionOperation")
    _check(call, a.query, a.out, a.num_heads, a.num_kv_heads)
    _check_pages(call, a.key_cache, a.value_cache, a.block_table, a.context_lens)
    return call


@kernel(
    f"atb::_npu_paged_attention({_PAGED}, *,Tensor? workspace=None) -> ()",
    host=("context_lens",),
    bundle=True,
)
def paged_attention(a: Arguments) -> None:
    """One query row per request [B, N, D] over its context_lens[b] cached keys; further rows stay unwritten."""
    call = _paged_call("_npu_paged_attention", a)
    if not call.context.execute:
        return
    rows = a.query.reshape(-1, a.num_heads, a.key_cache.size(3))
    target = a.out.view(-1, a.num_heads, a.value_cache.size(3))
    for b, length in enumerate(a.context_lens.tolist()[: rows.size(0)]):
        key, value = (_pages(call, cache, a.block_table[b], length) for cache in (a.key_cache, a.value_cache))
        result, _ = attend(rows[b : b + 1], key, value, None, a.scale_value, None, call.context, sink_in_lse=False)
        target[b] = result[0].to(a.out.dtype)


@kernel(f"atb::_npu_paged_attention_get_workspace({_PAGED}) -> Tensor", host=("context_lens",), bundle=True)
def paged_attention_get_workspace(a: Arguments) -> torch.Tensor:
    """Unwritten bytes."""
    _paged_call("_npu_paged_attention_get_workspace", a)
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a.query.device)


@kernel(
    "atb::_npu_flash_attention(Tensor query, Tensor key, Tensor value, Tensor mask, Tensor seq_len, float scale_value, "
    "int num_heads, int num_kv_heads, Tensor(a!) out) -> ()",
    host=("seq_len",),
)
def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """Packed prompts without a cache: query [T, N, D]; one mask [longest, longest], not zero where masked."""
    call = Call.of("_npu_flash_attention", "SelfAttentionOperation")
    _check(call, query, out, num_heads, num_kv_heads)
    lengths = [int(n) for n in seq_len.flatten().tolist()] if call.context.execute else []
    call.require(mask.dim() >= 2, None, f"mask should have two dimensions or more, got {shape(mask)}")
    call.require(
        max(lengths, default=0) <= min(mask.shape[-2:]) and sum(lengths) <= query.size(0),
        None,
        f"lengths {lengths} should fit mask {shape(mask)} and query {shape(query)}",
    )
    plain = mask.reshape(-1, *mask.shape[-2:])[0] if call.context.execute else mask
    rows, keys, values, target = (
        t.view(t.size(0), n, -1) if t is out else t.reshape(t.size(0), n, -1)
        for t, n in ((query, num_heads), (key, num_kv_heads), (value, num_kv_heads), (out, num_heads))
    )
    start = 0
    for length in lengths:
        at = slice(start, start + length)
        seen = plain[:length, :length] == 0
        result, _ = attend(rows[at], keys[at], values[at], seen, scale_value, None, call.context, sink_in_lse=False)
        target[at] = result.to(out.dtype)
        start += length


@kernel(
    "atb::_npu_flash_attention_qlens(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor "
    "mask, "
    "Tensor seq_len, Tensor context_lens, int num_kv_heads, int num_heads, float scale_value, Tensor(a!) out) -> ()",
    host=("seq_len", "context_lens"),
)
def flash_attention_qlens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    context_lens: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """Packed chunks behind a cached prefix: seq_len new rows of context_lens keys, causal from the end of the keys.

    Takes the compressed mask (a small triangle that is repeated) as causal without reading it.
    """
    call = Call.of("_npu_flash_attention_qlens", "SelfAttentionOperation")
    _check(call, query, out, num_heads, num_kv_heads)
    _check_pages(call, key_cache, value_cache, block_table, context_lens)
    if not call.context.execute:
        return
    rows, target = query.reshape(query.size(0), num_heads, -1), out.view(query.size(0), num_heads, -1)
    start = 0
    for b, (q_len, kv_len) in enumerate(zip(seq_len.tolist(), context_lens.tolist(), strict=True)):
        key, value = (_pages(call, cache, block_table[b], kv_len) for cache in (key_cache, value_cache))
        at, seen = slice(start, start + q_len), band(q_len, kv_len, kv_len, 0)
        result, _ = attend(rows[at], key, value, seen, scale_value, None, call.context, sink_in_lse=False)
        target[at] = result.to(out.dtype)
        start += q_len
