"""Brings expert rows back to their tokens: token_unpermute."""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, name_of, poison_, poisoned, shape
from ascend_emulator.rules import Call, Layer

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@kernel(
    "npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
)
def moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> torch.Tensor:
    """permuted [rows, H], sorted_indices int32 [M * K], probs [M, K] (without them K is 1) -> [M, H].

    out[i] = sum over k of probs[i, k] * permuted[sorted_indices[i * K + k]].
    """
    call = Call.of("npu_moe_token_unpermute", "aclnnMoeTokenUnpermute")
    rows = permuted_tokens
    call.require(not padded_mode, 61, "padded_mode should be False, got True", Layer.PARAMETER)
    call.require(
        rows.dim() == 2 and rows.dtype in FLOATS,
        61,
        f"permuted_tokens should be float [rows, H], got {name_of(rows.dtype)} {shape(rows)}",
        Layer.PARAMETER,
    )
    call.require(
        sorted_indices.dtype == torch.int32 and sorted_indices.dim() == 1,
        61,
        f"sorted_indices should be int32 [M * K], got {name_of(sorted_indices.dtype)} {shape(sorted_indices)}",
        Layer.PARAMETER,
    )
    if probs is None:
        tokens, choices = sorted_indices.numel(), 1
    else:
        call.require(
            probs.dim() == 2 and probs.dtype in FLOATS,
            61,
            f"probs should be float [M, K], got {name_of(probs.dtype)} {shape(probs)}",
            Layer.PARAMETER,
        )
        tokens, choices = probs.shape
        call.require(
            tokens * choices == sorted_indices.numel(),
            61,
            f"M * K of probs {shape(probs)} should be the number of sorted_indices, got {sorted_indices.numel()}",
            Layer.PARAMETER,
        )
    call.require(choices <= 512, 61, f"K should be at most 512, got {choices}")
    out = poisoned((tokens, rows.size(1)), rows)
    if not call.context.execute:
        return out
    index = sorted_indices.long().view(tokens, choices)
    wild = (index < 0) | (index >= rows.size(0))
    if wild.any():
        call.undefined(
            61, f"sorted_indices should be 0 to {rows.size(0) - 1}, got {sorted(set(index[wild].tolist()))[:8]}"
        )
    picked = rows[index.clamp(0, max(rows.size(0) - 1, 0))].float()
    # a plain product: a NaN in an unserved row survives a weight of zero, as on the device
    total = (picked if probs is None else picked * probs.float()[..., None]).sum(1)
    out.copy_(total)
    if wild.any():
        poison_rows = wild.any(1)
        out[poison_rows] = poison_(out[poison_rows])
    return out
