"""Device memory of a server: weights, KV cache, HCCL; decides if MXFP4 experts are expanded on Ascend.

    weights = all parameters in BF16, shared out by the ranks. Experts that stay in MXFP4 take 4.25 bits a weight; on
              Ascend a buffer holds one layer's experts in BF16; a step expands the experts it uses into it.
    KV      = layers * 2 * key heads * head_dim * 2 bytes for each token that a layer keeps: all of the context, or with
              KV cache groups the window and the tokens in flight (`kv_bytes`)
    HCCL    = 2 * its buffer for each communicator, to send and to receive

vLLM takes `--gpu-memory-utilization` (0.9) of a device; the rest after weights, activations and HCCL is KV cache. How
vllm-ascend reckons on a card of this size is run, by its own code, in tests/serving/emulated/test_memory.py. The doctor
predicts a server's decision with this arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npu_gptoss.model.config import MXFP4_GROUP, GptOssConfig, packed_columns

GIB = 1 << 30
UTILISATION = 0.9  # vLLM's default
UTILISATIONS = (UTILISATION, 0.95, 0.97)  # 0.95: of the Ascend article; the rest is for captured graphs
RESERVE = 2 * GIB  # activations of a prefill step, workspaces, the driver's context: a rule of thumb
BF16, MXFP4 = 2, 1 / 2 + 1 / MXFP4_GROUP  # bytes of a weight; four bits, and its share of a byte of scale
BLOCK = 128  # tokens of a KV cache block on Ascend
BUFFSIZE = 200  # MB: HCCL_BUFFSIZE's default, and what vllm-ascend 0.11.0 makes its groups with

VARIABLE = "NPU_GPTOSS_EXPERT_WEIGHTS"
AUTO, PACKED = "auto", "packed"  # or "expanded"


@dataclass(frozen=True)
class Part:
    """One rank's part of a model.

    ranks: that share heads and vocabulary. parts, experts: into how many parts each expert's width is cut, and how many
    experts are here. layers: of this pipeline stage; ends: how many of embedding and head;
    whole_embedding: each rank has all of its rows, as on a GPU.
    """

    ranks: int
    parts: int
    experts: int
    layers: int
    ends: int = 2
    whole_embedding: bool = False

    @classmethod
    def of(cls, config: GptOssConfig, ranks: int = 1) -> Part:
        """Each expert is cut by the ranks."""
        return cls(ranks, ranks, config.num_local_experts, config.num_hidden_layers)

    def columns(self, config: GptOssConfig, packed: bool = False) -> int:
        """Returns the columns of each expert's middle; packed: on the rank that has most of them."""
        width = config.intermediate_size // self.parts
        return max(packed_columns(rank, width) for rank in range(self.parts)) if packed else width


def room_bytes(config: GptOssConfig, part: Part, packed: bool = False) -> int:
    """The matrices of one layer's experts in BF16; packed: of experts that are expanded into it."""
    return BF16 * part.experts * 3 * config.hidden_size * part.columns(config, packed)


def weight_bytes(config: GptOssConfig, part: Part, packed: bool = False) -> int:
    """Returns the bytes of one rank, in BF16; packed: the experts' matrices in MXFP4. What every rank holds whole
    (norms, router, some biases) is not divided."""
    hidden, inner = config.hidden_size, part.columns(config, packed)
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    own_query, own_key = query // part.ranks, key // min(part.ranks, config.num_key_value_heads)
    attention = (own_query + 2 * own_key) * (hidden + 1) + hidden * own_query + hidden
    attention += config.num_attention_heads // part.ranks
    router = config.num_local_experts * (hidden + 1)
    layer = attention + router + part.experts * (2 * inner + hidden) + 2 * hidden
    rows = config.vocab_size * hidden
    ends = part.ends * rows // part.ranks + hidden + (rows - rows // part.ranks if part.whole_embedding else 0)
    others = BF16 * (part.layers * layer + ends)
    return others + int(part.layers * room_bytes(config, part, packed) * (MXFP4 / BF16 if packed else 1))


def kv_bytes_per_token(config: GptOssConfig, part: Part) -> int:
    """Returns the bytes of one rank whose layers all keep it."""
    heads = -(-config.num_key_value_heads // part.ranks)
    return part.layers * 2 * heads * config.head_dim * BF16


def kv_bytes(config: GptOssConfig, part: Part, length: int, in_flight: int | None = None) -> int:
    """The most that one request of `length` tokens takes on one rank. in_flight: the most tokens that are scheduled
    and not yet computed, for layers with a window in groups of their own; None: all layers keep all keys.

    By vLLM's SlidingWindowSpec: the window's blocks, those in flight, and one for a window that begins within a block.
    """
    token = kv_bytes_per_token(config, part)
    if in_flight is None:
        return length * token
    kept = min(config.sliding_window - 1 + in_flight, length)
    kept = BLOCK * (-(-kept // BLOCK) + 1)
    windows = sum(config.window(layer) is not None for layer in range(config.num_hidden_layers))
    return token * (length * (config.num_hidden_layers - windows) + kept * windows) // config.num_hidden_layers


def hccl_bytes(ranks: int, buffsize: int = BUFFSIZE) -> int:
    """Bytes that HCCL takes of a card under vllm-ascend 0.11.0 with tensor parallelism. buffsize: HCCL_BUFFSIZE, MB.

    The variable sizes one communicator: the MC2 operators', which every mixture of experts gets, on one card too. That
    of tensor parallelism is made with 200 MB, and what a communicator is made with goes before the variable.
    """
    return 2 * (buffsize + (BUFFSIZE if ranks > 1 else 0)) << 20


def buffsize(environ: Mapping[str, str]) -> int:
    """HCCL_BUFFSIZE in MB; a value that HCCL refuses counts as its default."""
    text = environ.get("HCCL_BUFFSIZE", "")
    return int(text) if text.isdecimal() and int(text) else BUFFSIZE


def mc2_buffsize(config: Any, rows: int) -> int:
    """MB of HCCL_BUFFSIZE that dispatch to experts needs on an A3, as CANN's tiling computes it (8.3 and 9.1,
    moe_distribute_dispatch_v2): all rows of all ranks for each expert here, and a rank's own rows on their way back.

    config: this package's or transformers'. rows: of one rank, in BF16, each with 44 bytes beside it.
    """
    row = 2 * config.hidden_size
    sent, returned = (-(-size // 512) * 512 for size in (-(-row // 32) * 32 + 44, row))
    needed = 2 * rows * (config.num_local_experts * sent + config.num_experts_per_tok * returned)
    return -(-needed // (1 << 20))


@dataclass(frozen=True)
class Fit:
    """One rank's memory, in bytes, at a utilisation. `tokens`: KV cache after weights, reserve and HCCL's buffers, for
    requests of `length`, as vLLM logs it."""

    weights: int
    kv: int
    length: int
    total: int
    utilisation: float
    hccl: int
    tokens: int

    @property
    def needed(self) -> int:
        """Bytes that are certain."""
        return self.weights + self.kv + self.hccl

    def short(self, utilisation: float | None = None) -> int:
        """Bytes, reserve included, that the utilisation does not give; negative: they are left."""
        return int(self.needed + RESERVE - self.total * (utilisation or self.utilisation))

    def fits(self, utilisation: float | None = None, reserve: int = RESERVE) -> bool:
        return self.needed + reserve <= self.total * (utilisation or self.utilisation)

    def sum(self, reserve: int = RESERVE) -> str:
        """The arithmetic of `fits` in words."""
        terms = [f"{gib(self.weights)} of weights"]
        terms += [f"{gib(reserve)} for activations and the driver"] if reserve else []
        terms += [f"{gib(self.hccl)} of HCCL's buffers"] if self.hccl else []
        terms += [f"{gib(self.kv)} of KV cache for one request of {self.length} tokens"]
        return (
            f"{' + '.join(terms)} = {gib(self.needed + reserve)} of the {gib(self.total * self.utilisation)} that "
            f"--gpu-memory-utilization {self.utilisation:g} takes of {gib(self.total)}"
        )


def fit(
    config: GptOssConfig,
    part: Part,
    length: int,
    total: int,
    utilisation: float = UTILISATION,
    *,
    packed: bool = False,
    room: bool = False,
    hccl: int = 0,
    in_flight: int | None = None,
) -> Fit:
    """room: bytes for one layer's experts in BF16, in addition to packed experts. in_flight: as of `kv_bytes`."""
    weights = weight_bytes(config, part, packed) + (room_bytes(config, part, packed) if room else 0)
    left = int(total * utilisation) - weights - RESERVE - hccl
    tokens = left * length // kv_bytes(config, part, length, in_flight)
    return Fit(weights, kv_bytes(config, part, length, in_flight), length, total, utilisation, hccl, max(0, tokens))


@dataclass(frozen=True)
class Choice:
    """The decision of a server on Ascend to keep its experts packed. objection: the reason why it cannot."""

    wish: str
    expanded: Fit
    kept: Fit
    objection: str = ""

    @property
    def packed(self) -> bool:
        """BF16 where it fits: the expansion costs time."""
        return self.wish == PACKED or (self.wish == AUTO and not self.objection and not self.expanded.fits())

    @property
    def fit(self) -> Fit:
        return self.kept if self.packed else self.expanded

    @property
    def hopeless(self) -> bool:
        """True when vLLM would find no room for one request after it has loaded the weights."""
        return not self.fit.fits(reserve=0)

    def sentence(self) -> str:
        """The choice and its reason, for the log or for an error."""
        left = f"about {thousands(self.fit.tokens)} tokens of KV cache are left"
        packed = f"packed {gib(self.kept.weights)} of weights, one layer's experts in BF16 included"
        cannot = f"They cannot stay packed here: {self.objection}" if self.objection else ""
        if self.hopeless:
            other = cannot or "Expanded to BF16 they would not fit either"
            return f"weights and one request do not fit: {self.fit.sum(reserve=0)}. {other}"
        if self.packed:
            why = f"{VARIABLE}=packed"
            if self.wish != PACKED:
                why = (
                    f"expanded they do not fit: {self.expanded.sum()}; {self.expanded.short() / (1 << 20):.0f} MiB lack"
                )
                higher = next((each for each in UTILISATIONS if self.expanded.fits(each)), None)
                why += f"; --gpu-memory-utilization {higher} expands them, which is faster" if higher else ""
            return f"experts stay packed in MXFP4 ({why}); {packed}, and {left}"
        fits = "fits" if self.expanded.fits() else "is tight"
        other = cannot or f"{VARIABLE}=packed would leave about {thousands(self.kept.tokens)}"
        return f"experts are expanded to BF16, which {fits}: {self.expanded.sum()}; {left}. {other}"


def choose(
    config: GptOssConfig,
    part: Part,
    length: int,
    total: int,
    utilisation: float = UTILISATION,
    *,
    hccl: int = 0,
    in_flight: int | None = None,
    objection: str = "",
    wish: str = AUTO,
) -> Choice:
    """Chooses a server's settings on Ascend, for requests of up to `length` tokens on a device of `total` bytes.
    in_flight: as of `kv_bytes`."""
    expanded = fit(config, part, length, total, utilisation, hccl=hccl, in_flight=in_flight)
    packed = fit(config, part, length, total, utilisation, packed=True, room=True, hccl=hccl, in_flight=in_flight)
    return Choice(wish, expanded, packed, objection)


def gib(size: float) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size < GIB else f"{size / GIB:.1f} GiB"


def thousands(tokens: int) -> str:
    return f"{tokens / 1e6:.1f} million" if tokens >= 1_000_000 else f"{tokens // 1000} thousand"
