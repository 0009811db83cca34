"""One call of npu_fused_infer_attention_score with version 2's names, and the checks that all layouts share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from ascend_emulator.ops.table import shape
from ascend_emulator.rules import Call, Layer

MASK_SIDE = 2048
TND_LAYOUTS = ("TND", "NTD_TND")
BATCH_LAYOUTS = ("BSH", "BSND", "BNSD")
COMPRESSED_MODES = (2, 3, 4)


@dataclass
class FiaCall:
    """The arguments of either version, with version 2's names."""

    version: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    qlen: object
    kvlen: object
    block_table: torch.Tensor | None
    sink: torch.Tensor | None
    heads: int
    kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    layout: str
    sparse_mode: int
    block_size: int
    inner_precise: int
    want_lse: bool
    pse_shift: torch.Tensor | None = None
    query_rope: torch.Tensor | None = None
    key_rope: torch.Tensor | None = None
    quantisation: dict[str, torch.Tensor | None] = field(default_factory=dict)
    unmodelled: dict[str, object] = field(default_factory=dict)

    @property
    def paged(self) -> bool:
        return self.block_table is not None


@dataclass(frozen=True)
class Plan:
    """A legal call. `requests` holds (first query row or batch index, query length, key length)."""

    call: FiaCall
    requests: tuple[tuple[int, int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]


def strided(fia: FiaCall) -> dict[str, torch.Tensor]:
    """Operands that the operator copies whole in every call because they are not contiguous [R35]."""
    operands = {name: getattr(fia, name) for name in ("query", "key", "value")}
    return {name: tensor for name, tensor in operands.items() if not tensor.is_contiguous()}


def host_lengths(call: Call, lengths: object, name: str) -> list[int] | None:
    """Sequence lengths as integers; a device tensor costs a synchronisation per element [R12]."""
    if lengths is None:
        return None
    tensors = [lengths] if isinstance(lengths, torch.Tensor) else [x for x in lengths if isinstance(x, torch.Tensor)]
    if any(call.context.is_device(t) for t in tensors) and tensors:
        sentence = f"{name} is expected as host integers, got a device tensor of shape {shape(tensors[0])}"
        if call.context.capturing:
            call.reject(12, sentence, Layer.CAPTURE)
        call.note(12, sentence)
    return [int(x) for x in (lengths.flatten().tolist() if isinstance(lengths, torch.Tensor) else lengths)]


def check_mask_shape(call: Call, fia: FiaCall) -> None:
    mask = fia.mask
    if fia.sparse_mode in (3, 4):
        call.require(
            mask is not None and mask.numel() > 0,
            21,
            f"attenMask should not be null or empty when sparse mode = {fia.sparse_mode}, got {shape(mask)}",
        )
    if mask is None or fia.sparse_mode not in COMPRESSED_MODES:
        return
    legal = [[1] * n + [MASK_SIDE, MASK_SIDE] for n in (0, 1, 2)]
    call.require(
        list(mask.shape) in legal,
        22,
        "attenMask shape must be (2048, 2048) or (1, 2048, 2048) or (1, 1, 2048, 2048) when sparse mode = "
        f"{fia.sparse_mode}, got {shape(mask)}",
    )


def check_band(call: Call, pre: int, next_: int, q_lens: list[int], kv_lens: list[int]) -> None:
    call.require(not (pre < 0 and next_ < 0), 26, f"preTokens[{pre}] and nextTokens[{next_}] must not both be negative")
    call.require(
        pre + next_ >= 0,
        26,
        f"The sum of preTokens[{pre}] and nextTokens[{next_}] must be greater than or equal to 0",
    )
    for i, (q, kv) in enumerate(zip(q_lens, kv_lens, strict=True)):
        call.require(
            q == 0 or kv == 0 or (q + pre >= 0 and kv + next_ >= 0),
            26,
            f"Batch[{i}], actualSeqLen[{q}] + preTokens[{pre}] must be greater than or equal to 0 and "
            f"actualSeqLenKv[{kv}] + nextTokens[{next_}] must be greater than or equal to 0",
        )
