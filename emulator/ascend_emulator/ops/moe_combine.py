"""Brings expert rows back to their tokens: token_unpermute and finalize_routing."""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, name_of, poison_, poisoned, shape
from ascend_emulator.rules import Call, Layer

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
DROPLESS = (0, 2)
COLUMN_MAJOR = (0, 1)


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


@kernel(
    "npu::npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
    "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0) -> Tensor"
)
def moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
) -> torch.Tensor:
    """skip1 + skip2 + sum over k of scales[i, k] * (rows[place(i, k)] + bias[expert(i, k)]), [M, H] in the rows' dtype.

    Modes 0 and 1 store places by column (i + k * M), 2 and 3 by row; 1 and 3 have rows [E, C, H], and -1 for none.
    """
    call = Call.of("npu_moe_finalize_routing", "aclnnMoeFinalizeRoutingV2")
    rows, places, mode = expanded_permuted_rows, expanded_src_to_dst_row, drop_pad_mode or 0
    call.require(mode in (0, 1, 2, 3), 62, f"drop_pad_mode should be 0 to 3, got {mode}", Layer.PARAMETER)
    call.require(
        rows.dtype in FLOATS and rows.dim() == (2 if mode in DROPLESS else 3),
        62,
        f"rows should be float {'[M * K, H]' if mode in DROPLESS else '[E, C, H]'}, got {name_of(rows.dtype)} "
        f"{shape(rows)}",
        Layer.PARAMETER,
    )
    call.require(
        places.dtype == torch.int32 and places.dim() == 1,
        62,
        f"expanded_src_to_dst_row should be int32 [M * K], got {name_of(places.dtype)} {shape(places)}",
        Layer.PARAMETER,
    )
    call.require(
        skip2 is None or skip1 is not None, 62, f"skip2 {shape(skip2)} needs skip1, which is None", Layer.PARAMETER
    )
    call.require(
        bias is None or export_for_source_row is not None,
        62,
        f"bias {shape(bias)} needs export_for_source_row, which is None",
        Layer.PARAMETER,
    )
    tokens = scales.size(0) if scales is not None else places.numel()
    choices = places.numel() // max(tokens, 1)
    hidden = rows.size(-1)
    _check_options(call, rows, skip1, skip2, bias, scales, export_for_source_row, tokens, choices, hidden)
    out = poisoned((tokens, hidden), rows)
    if not call.context.execute:
        return out
    flat = rows.reshape(-1, hidden)
    index = places.long().view(choices, tokens).T if mode in COLUMN_MAJOR else places.long().view(tokens, choices)
    lowest = 0 if mode in DROPLESS else -1
    wild = (index < lowest) | (index >= flat.size(0))
    if wild.any():
        call.undefined(62, f"places should be {lowest} to {flat.size(0) - 1}, got {index[wild].tolist()[:8]}")
    picked = flat[index.clamp(0, max(flat.size(0) - 1, 0))].float().masked_fill((index == -1)[..., None], 0.0)
    if bias is not None:
        picked = picked + bias[export_for_source_row.long()].float()
    if scales is not None:
        picked = picked * scales.float()[..., None]
    total = picked.sum(1)
    for skip in (skip1, skip2):
        if skip is not None:
            total = total + skip.float()
    out.copy_(total)
    if wild.any():
        out[wild.any(1)] = float("nan")
    return out


def _check_options(
    call: Call,
    rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    experts: torch.Tensor | None,
    tokens: int,
    choices: int,
    hidden: int,
) -> None:
    wanted = {
        "skip1": (skip1, [tokens, hidden]),
        "skip2": (skip2, [tokens, hidden]),
        "scales": (scales, [tokens, choices]),
        "bias": (bias, [bias.size(0) if bias is not None else 0, hidden]),
    }
    for name, (tensor, size) in wanted.items():
        if tensor is not None:
            call.require(
                tensor.dtype == rows.dtype and list(tensor.shape) == size,
                62,
                f"{name} should be {name_of(rows.dtype)} {size}, got {name_of(tensor.dtype)} {shape(tensor)}",
                Layer.PARAMETER,
            )
    if experts is not None:
        call.require(
            experts.dtype == torch.int32 and list(experts.shape) == [tokens, choices],
            62,
            f"export_for_source_row should be int32 [{tokens}, {choices}], got {name_of(experts.dtype)} "
            f"{shape(experts)}",
            Layer.PARAMETER,
        )
