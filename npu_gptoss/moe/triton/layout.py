"""The layout of experts' weights for the Triton kernels: tiles of 64 rows by 64 inputs, each contiguous.

A program loads a tile at once, so its bytes lie together and every load is 16 bytes wide. Within a tile the
values are spread over 16-bit words such that a kernel opens a word with shifts and masks only, and finds the results
where the tensor cores want them, without an exchange between threads:

* MXFP4: words 2i and 2i + 1 of a row hold the codes of inputs 2i, 16 + 2i, 32 + 2i and 48 + 2i and of the next ones.
  Opening them (`device.open_mxfp4`) puts sign and the three bits of exponent and mantissa at bits 15 and 8 to 6, where
  they are a bfloat16 of 2 ** -126 times the value; one multiplication by a power of two, exact, gives the weight. The
  first two codes lie in one group of 32, the other two in the next; of each row and two tiles the four exponents are
  one 32-bit word.
* FP8 (E4M3): word i holds the values of inputs i and 32 + i, opened likewise as bfloat16 of 2 ** -120 times the value;
  the scale of a row multiplies its sum.
* bfloat16: as it is.

Rows of gate and up are dealt out in bands: 8 of gate, then the 8 of up that belong to them, which the tensor cores
leave in the same thread, so that the activation needs no exchange either. (The trick of opening MXFP4 by masks is
widely known: Marlin and the kernels of Triton's own repository have forms of it.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from npu_gptoss.errors import InputError
from npu_gptoss.moe.weights import AnyExperts, ExpertWeights, Fp8Experts, Mxfp4Experts

ROWS = 64  # of a tile
MOST_ROWS = 128  # of a kernel's tile: as many rows, or half as many, or a quarter …, may be taken at once
INPUTS = 64  # of a tile
BAND = 8  # rows of gate, then as many of up
# 2 ** (scale - 127) * 2 ** 126 as bfloat16 has the exponent field scale + 126, which must stay below 255
EXPONENT_SHIFT = 126
LARGEST_SCALE = 254 - EXPONENT_SHIFT
# Experts that are brought into the layout at once: enough to fill a GPU, little enough to need no memory to speak of
_AT_ONCE = 4


@dataclass(frozen=True)
class TiledMatrix:
    """One projection of all experts.

    words: [experts, row tiles, input tiles, 64, n] uint16 (n 16: MXFP4, 32: FP8) or bfloat16 (n 64); rows and inputs
        beyond the matrix are zero.
    scales: MXFP4: [experts, row tiles, ceil(input tiles / 2), 64] int32; FP8: [experts, rows] float32; else None.
    bias: [experts, rows] in the dtype of the activations, rows in the order of the words.
    """

    words: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor
    rows: int
    inputs: int


@dataclass(frozen=True)
class TiledExperts:
    """A layer's experts for all Triton kernels. format: "mxfp4", "float8_e4m3fn" or "bfloat16"."""

    format: str
    gate_up: TiledMatrix
    down: TiledMatrix
    expert_map: torch.Tensor | None  # [global experts] int32
    num_experts: int

    def matrix(self, name: str) -> TiledMatrix:
        """Returns a projection by its official name: gate_up_proj or down_proj."""
        return self.gate_up if name == "gate_up_proj" else self.down


def prepare(weights: AnyExperts, swiglu_limit: float) -> TiledExperts:
    """The work that is done once, at load."""
    if weights.intermediate_size % BAND:
        raise InputError(
            f"the Triton kernels want an intermediate size that {BAND} divides, got {weights.intermediate_size}; "
            "set NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops",
            field="intermediate_size",
        )
    return TiledExperts(
        weights.format,
        _tiled(weights, "gate_up_proj"),
        _tiled(weights, "down_proj"),
        None if weights.expert_map is None else weights.expert_map.to(torch.int32),
        weights.num_experts,
    )


def untiled(experts: TiledExperts) -> AnyExperts:
    """The inverse of `prepare`, for a call that is replayed from a file."""
    shared = {
        "gate_up_proj_bias": _unbanded(experts.gate_up.bias),
        "down_proj_bias": experts.down.bias,
        "expert_map": None if experts.expert_map is None else experts.expert_map.long(),
    }
    gate_up, down = _values(experts.gate_up), _values(experts.down)
    gate_up = _unbanded(gate_up)
    if experts.format == Mxfp4Experts.format:
        pairs = (codes.unflatten(-1, (-1, 16, 2)) for codes in (gate_up, down))
        blocks = [(each[..., 0] | each[..., 1] << 4).to(torch.uint8) for each in pairs]
        scales = _unbanded(_exponents(experts.gate_up)), _exponents(experts.down)
        return Mxfp4Experts(
            gate_up_proj_blocks=blocks[0],
            gate_up_proj_scales=scales[0],
            down_proj_blocks=blocks[1],
            down_proj_scales=scales[1],
            **shared,
        )
    if experts.format == Fp8Experts.format:
        raw = (each.to(torch.uint8).view(torch.float8_e4m3fn) for each in (gate_up, down))
        scales = {"gate_up_proj_scales": _unbanded(experts.gate_up.scales), "down_proj_scales": experts.down.scales}
        return Fp8Experts(**dict(zip(("gate_up_proj", "down_proj"), raw, strict=True)), **scales, **shared)
    return ExpertWeights(gate_up.mT.contiguous(), down_proj=down.mT.contiguous(), **shared)


def _values(matrix: TiledMatrix) -> torch.Tensor:
    """[experts, rows, inputs]: codes of MXFP4, bytes of FP8, or bfloat16."""
    words = matrix.words.transpose(2, 3).flatten(1, 2)[:, : matrix.rows]  # [experts, rows, input tiles, n]
    if words.dtype == torch.uint16:
        words = words.view(torch.int16).to(torch.int32) & 0xFFFF
        four = words.shape[-1] == 16
        words = _open_mxfp4(words) if four else _open_fp8(words)
    return words.flatten(2)[..., : matrix.inputs]


def _open_mxfp4(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `mxfp4_words`: [..., n] -> [..., 4 * n]."""
    across = (words >> 12 & 7).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    first, second = (words >> 12 & 8) | (words >> 6 & 7), (words >> 8 & 8) | (words >> 2 & 7)
    third, fourth = (words >> 2 & 8) | across, (words >> 6 & 8) | (words >> 8 & 4) | (words & 3)
    return torch.stack((first, second, third, fourth), -2).flatten(-2)


def _open_fp8(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `fp8_words`: [..., n] -> [..., 2 * n]."""
    first = (words >> 8 & 0x80) | (words >> 4 & 0x7F)
    second = (words >> 7 & 0x80) | (words >> 7 & 0x70) | (words & 0x0F)
    return torch.stack((first, second), -2).flatten(-2)


def _exponents(matrix: TiledMatrix) -> torch.Tensor:
    """[experts, rows, inputs / 32]: the scales of MXFP4."""
    scales = matrix.scales.contiguous().view(torch.uint8).unflatten(-1, (ROWS, 4))
    scales = scales.transpose(2, 3).flatten(1, 2)[:, : matrix.rows].flatten(2)
    return (scales - EXPONENT_SHIFT)[..., : matrix.inputs // 32]


def _unbanded(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `bands`."""
    return rows.unflatten(1, (-1, 2, BAND)).transpose(2, 3).flatten(1, 3)


def _tiled(weights: AnyExperts, name: str) -> TiledMatrix:
    bias = getattr(weights, name + "_bias")
    experts, rows = bias.shape
    inputs = weights.hidden_size if name == "gate_up_proj" else weights.intermediate_size
    row_tiles, input_tiles = -(-rows // MOST_ROWS) * (MOST_ROWS // ROWS), -(-inputs // INPUTS)
    width, dtype = {Mxfp4Experts: (16, torch.uint16), Fp8Experts: (32, torch.uint16)}.get(
        type(weights), (INPUTS, weights.dtype)
    )
    words = torch.empty(experts, row_tiles, input_tiles, ROWS, width, dtype=dtype, device=bias.device)
    scales = None
    if isinstance(weights, Mxfp4Experts):
        scales = words.new_empty(experts, row_tiles, -(-input_tiles // 2), ROWS, dtype=torch.int32)
    elif isinstance(weights, Fp8Experts):
        scales = words.new_empty(experts, rows, dtype=torch.float32)
    matrix = TiledMatrix(words, scales, _ordered(bias, name).contiguous(), rows, inputs)
    fill(matrix, weights, name)
    return matrix


def fill(matrix: TiledMatrix, weights: AnyExperts, name: str) -> None:
    """Writes all words and scales of one projection; weights: need not hold the other one (`weights.lone`)."""
    words, exponents = matrix.words, None
    if words.dtype == torch.uint16:
        words = words.view(torch.int16)
    if isinstance(weights, Mxfp4Experts):
        exponents = matrix.scales.view(torch.uint8).unflatten(-1, (ROWS, 4))
        _check_scales(getattr(weights, name + "_scales"))
    elif isinstance(weights, Fp8Experts):
        matrix.scales.copy_(_ordered(getattr(weights, name + "_scales"), name))
    for first in range(0, len(words), _AT_ONCE):
        some = slice(first, min(first + _AT_ONCE, len(words)))
        words[some] = _in_tiles(_ordered(_words(weights, name, some), name))
        if exponents is not None:
            groups, pairs = getattr(weights, name + "_scales")[some] + EXPONENT_SHIFT, exponents.shape[2]
            groups = F.pad(groups, (0, 4 * pairs - groups.shape[-1]), value=EXPONENT_SHIFT)
            exponents[some] = _in_tiles(_ordered(groups.unflatten(-1, (pairs, 4)), name))


def fill_bias(matrix: TiledMatrix, bias: torch.Tensor, name: str) -> None:
    """bias: [experts, rows] in the official order."""
    matrix.bias.copy_(_ordered(bias, name))


def _ordered(rows: torch.Tensor, name: str) -> torch.Tensor:
    """[experts, rows, …] in the order of the words."""
    return bands(rows) if name == "gate_up_proj" else rows


def bands(rows: torch.Tensor) -> torch.Tensor:
    """[experts, rows, …], rows gate, up, gate, up … -> 8 of gate, 8 of up, 8 of gate …"""
    return rows.unflatten(1, (-1, BAND, 2)).transpose(2, 3).flatten(1, 3)


def _in_tiles(values: torch.Tensor) -> torch.Tensor:
    """[experts, rows, input tiles, n] -> [experts, row tiles, input tiles, 64, n]; missing rows become zero."""
    values = F.pad(values, (0, 0, 0, 0, 0, -values.shape[1] % MOST_ROWS))
    return values.unflatten(1, (-1, ROWS)).transpose(2, 3)


def _check_scales(scales: torch.Tensor) -> None:
    largest = int(scales.max())
    if largest > LARGEST_SCALE:
        raise InputError(
            f"the Triton kernels take MXFP4 scales up to {LARGEST_SCALE} (weights up to 12), got {largest}. "
            "If that is meant, load with weights=bf16",
            field="scales",
        )


def _words(weights: AnyExperts, name: str, some: slice) -> torch.Tensor:
    """[some, rows, input tiles, n]: the words of whole rows, inputs padded with zeros to whole tiles."""
    if isinstance(weights, Mxfp4Experts):
        blocks = getattr(weights, name + "_blocks")[some]
        codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-3).to(torch.int16)
        return mxfp4_words(_whole_tiles(codes).unflatten(-1, (-1, 4, 16)))
    if isinstance(weights, Fp8Experts):
        values = getattr(weights, name)[some].view(torch.uint8).to(torch.int16)
        return fp8_words(_whole_tiles(values).unflatten(-1, (-1, 2, 32)))
    assert isinstance(weights, ExpertWeights)
    return _whole_tiles(getattr(weights, name)[some].transpose(1, 2)).unflatten(-1, (-1, INPUTS))


def _whole_tiles(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values, (0, -values.shape[-1] % INPUTS))


def mxfp4_words(codes: torch.Tensor) -> torch.Tensor:
    """codes [..., 4, n] int16, each sign, exponent (2 bits), mantissa -> [..., n] words that `open_mxfp4` opens.

    The third codes of two words lie across them, so that one rotation of both puts them right: a word has its sign, its
    neighbour the rest. Of all arrangements of four codes in 16 bits those that open with nine instructions do so.
    """
    first, second, third, fourth = codes.unbind(-2)
    across = third.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (
        ((first & 8) << 12)
        | ((first & 7) << 6)
        | ((second & 8) << 8)
        | ((second & 7) << 2)
        | ((third & 8) << 2)
        | ((across & 7) << 12)
        | ((fourth & 8) << 6)
        | ((fourth & 4) << 8)
        | (fourth & 3)
    )


def fp8_words(values: torch.Tensor) -> torch.Tensor:
    """values [..., 2, n] int16, each the byte of an E4M3 -> [..., n] words that `open_fp8` opens."""
    first, second = values.unbind(-2)
    return (
        ((first & 0x80) << 8)
        | ((first & 0x7F) << 4)
        | ((second & 0x80) << 7)
        | ((second & 0x70) << 7)
        | (second & 0x0F)
    )


@dataclass(frozen=True)
class Call:
    """Inputs of the experts, contiguous. expert_map: any tensor where there is no map; its pointer is not followed."""

    hidden: torch.Tensor
    experts: TiledExperts
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor
    swiglu_limit: float

    @property
    def slots(self) -> int:
        return self.topk_ids.numel()

    @property
    def top_k(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def has_map(self) -> bool:
        return self.experts.expert_map is not None


def call_of(
    hidden_states: torch.Tensor,
    weights: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> Call:
    """The contiguous inputs of a call. Raises InputError for another dtype than bfloat16."""
    if hidden_states.dtype != torch.bfloat16:
        raise InputError(
            f"hidden_states must be bfloat16 for the Triton kernels, got {hidden_states.dtype}", field="hidden_states"
        )
    topk_ids = topk_ids.contiguous()
    expert_map = topk_ids if weights.expert_map is None else weights.expert_map
    topk_weights = topk_weights.float().contiguous()
    return Call(hidden_states.contiguous(), weights, topk_weights, topk_ids, expert_map, swiglu_limit)
