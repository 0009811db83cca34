"""Writes keys and values into the paged cache."""

from __future__ import annotations

import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ
from ascend_emulator.ops.table import kernel, name_of, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

NZ_INNER = 16  # elements of 16 bits in the innermost 32 bytes


def _slots(call: Call, slots: torch.Tensor, capacity: int, *, skip_negative: bool) -> torch.Tensor:
    """Row numbers to write; -1 skips a row."""
    rows = slots.flatten().long()
    wild = (rows >= capacity) | (rows < (-(1 << 40) if skip_negative else 0))
    if wild.any():
        call.undefined(
            76, f"slots should be {'below' if skip_negative else '0 up to'} {capacity}, got {rows[wild].tolist()[:8]}"
        )
        rows = rows.masked_fill(wild, -1)
    return rows


def _write(cache: torch.Tensor, new: torch.Tensor, rows: torch.Tensor, *, nz: bool) -> None:
    """cache [n, block, N, D] or, in FRACTAL_NZ, [n, N * D / 16, block, 16]; new [T, N, D]."""
    kept = rows >= 0
    rows, new = rows[kept], new[kept].to(cache.dtype)
    if nz:
        block = cache.size(2)
        cache[rows // block, :, rows % block] = new.reshape(new.size(0), -1, cache.size(3))
    else:
        cache.view(-1, *cache.shape[2:])[rows] = new.reshape(new.size(0), *cache.shape[2:])


@kernel(
    "atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_indices) -> ()"
)
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """key, value [T, N, D]; caches [n, block, N, D]; slots int32 [T] = block id * block + offset, negative to skip."""
    call = Call.of("_npu_reshape_and_cache", "ReshapeCacheOperation")
    call.require(
        slot_indices.dtype == torch.int32,
        76,
        f"slot_indices should be int32, got {name_of(slot_indices.dtype)} {shape(slot_indices)}",
    )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        call.require(
            cache.is_contiguous() and cache.dim() == 4,
            76,
            f"at_tensor is not contiguous: {name} {shape(cache)} with strides {list(cache.stride())}",
            Layer.BINDING,
        )
    formats = [call.context.format_of(cache) for cache in (key_cache, value_cache)]
    call.require(formats[0] == formats[1], 76, f"both caches should have one format, got {formats}", Layer.BINDING)
    dtypes = {t.dtype for t in (key, value, key_cache, value_cache)}
    call.require(
        len(dtypes) == 1, 76, f"keys, values and caches should share one dtype, got {sorted(map(name_of, dtypes))}"
    )
    nz = formats[0] == FORMAT_FRACTAL_NZ
    for new, cache in ((key, key_cache), (value, value_cache)):
        width = cache.size(1) * cache.size(3) if nz else cache.size(2) * cache.size(3)
        call.require(
            new.dim() == 3 and new.size(0) == slot_indices.numel() and new[0:1].numel() in (0, width),
            None,
            f"one slot a token and N * D = {width} expected, got {shape(new)}, {slot_indices.numel()} slots, "
            f"{shape(cache)}",
        )
    if call.context.execute:
        block = key_cache.size(2 if nz else 1)
        rows = _slots(call, slot_indices, key_cache.size(0) * block, skip_negative=True)
        _write(key_cache, key, rows, nz=nz)
        _write(value_cache, value, rows, nz=nz)


@kernel(
    "npu::npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
    "slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None) -> ()"
)
def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
) -> None:
    """The same through aclnn; the shape of the caches selects [n, block, N, D] or [n, N * D / 16, block, 16]."""
    call = Call.of("npu_scatter_pa_kv_cache", "aclnnScatterPaKvCache")
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    dtypes = {t.dtype for t in tensors.values()}
    call.require(
        len(dtypes) == 1, 76, f"all should share one dtype, got {sorted(map(name_of, dtypes))}", Layer.PARAMETER
    )
    for name, tensor in (*tensors.items(), ("slot_mapping", slot_mapping)):
        call.require(
            tensor.is_contiguous(),
            76,
            f"{name} should be contiguous, got {shape(tensor)} with strides {list(tensor.stride())}",
            Layer.PARAMETER,
        )
    call.require(
        slot_mapping.dtype in (torch.int32, torch.int64),
        76,
        f"slot_mapping should be int32 or int64, got {name_of(slot_mapping.dtype)}",
        Layer.PARAMETER,
    )
    if key.dim() == 4 or compress_lens is not None:
        raise NotEmulatedError("npu_scatter_pa_kv_cache: the emulator has no compressed caches")
    call.require(
        key.dim() == value.dim() == 3
        and key_cache.dim() == value_cache.dim() == 4
        and key.shape[:2] == value.shape[:2],
        None,
        f"key and value should be [T, N, D] and caches four-dimensional: {', '.join(map(shape, tensors.values()))}",
    )
    nz = key_cache.shape[2:] != key.shape[1:]
    last = key_cache.size(3)
    call.require(
        not nz or (last == NZ_INNER and key_cache.size(1) * last == key.size(1) * key.size(2)),
        None,
        f"key_cache {shape(key_cache)} fits key {shape(key)} neither as [n, block, N, D] nor as [n, N * D / 16, "
        "block, 16]",
    )
    if not call.context.execute:
        return
    block = key_cache.size(2 if nz else 1)
    rows = _slots(call, slot_mapping, key_cache.size(0) * block, skip_negative=False)
    if rows[rows >= 0].unique().numel() != int((rows >= 0).sum()):
        call.undefined(76, f"slots should differ, got {rows.tolist()[:16]}")
    _write(key_cache, key, rows, nz=nz)
    _write(value_cache, value, rows, nz=nz)
