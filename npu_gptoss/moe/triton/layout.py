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

import functools
import operator
from collections.abc import Sequence
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
        return words_of(_whole_tiles(values).unflatten(-1, (-1, 2, 32)).unbind(-2), FP8_BITS)
    assert isinstance(weights, ExpertWeights)
    return _whole_tiles(getattr(weights, name)[some].transpose(1, 2)).unflatten(-1, (-1, INPUTS))


def _whole_tiles(values: torch.Tensor) -> torch.Tensor:
    return F.pad(values, (0, -values.shape[-1] % INPUTS))


# Where the words have a value's bits: (number of the value, its bits, how far they are moved). Of all arrangements of
# four codes (sign, two bits of exponent, mantissa) in 16 bits those that open with nine instructions do so. The third
# codes of two words lie across them, so that one rotation of both puts them right: a word has its sign, and the rest of
# its neighbour's, which counts as value 4.
MXFP4_BITS = ((0, 8, 12), (0, 7, 6), (1, 8, 8), (1, 7, 2), (2, 8, 2), (4, 7, 12), (3, 8, 6), (3, 4, 8), (3, 3, 0))
FP8_BITS = ((0, 0x80, 8), (0, 0x7F, 4), (1, 0x80, 7), (1, 0x70, 7), (1, 0x0F, 0))  # of two bytes of E4M3


def mxfp4_words(codes: torch.Tensor) -> torch.Tensor:
    """codes [..., 4, n] int16 -> [..., n] words that `open_mxfp4` opens."""
    values = codes.unbind(-2)
    return words_of((*values, neighbours(values[2])), MXFP4_BITS)


def words_of(values: Sequence[torch.Tensor], table: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return functools.reduce(operator.or_, ((values[number] & bits) << by for number, bits, by in table))


def neighbours(words: torch.Tensor) -> torch.Tensor:
    """[..., n], n even: words 2i and 2i + 1 exchanged."""
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


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
