"""Device memory against the weights and the KV cache.

    weights = (all parameters, experts expanded to BF16) * 2 bytes, shared out by tensor parallelism; where the offline
              engine has kernels for MXFP4 (on CUDA), a checkpoint's MXFP4 experts stay at 4.25 bits
    KV      = layers * 2 * key heads * head_dim * 2 bytes for each token of the context

    HCCL    = 2 * its buffer for each communicator, to send and to receive

vLLM takes `--gpu-memory-utilization` (0.9) of a device; what weights, activations and HCCL leave of it is KV cache. All
layers keep all keys (docs/decisions.md, one KV cache group). How vllm-ascend reckons on a card of this size is run, by
its own code, in tests/serving/emulated/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, warning
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig, published_config, tensor_parallel_objection
from npu_gptoss.nominal import MEMORY

UTILISATION = 0.9  # vLLM's default
UTILISATIONS = (UTILISATION, 0.95, 0.97)  # 0.95: what the Ascend article serves with; the rest is for captured graphs
RESERVE = 2 * GIB  # activations of a prefill step, workspaces, the driver's context: a rule of thumb
BF16, MXFP4 = 2, 17 / 32  # bytes; four bits, and a byte of scale for 32
CARD = MEMORY["910B3"]
BUFFSIZE = 200  # MB: HCCL_BUFFSIZE's default, and what vllm-ascend 0.11.0 makes its groups with

PUBLISHED_20B, PUBLISHED_120B = published_config(), published_config(36, experts=128)
PRESETS = (
    ("gpt-oss-20b on one card", PUBLISHED_20B, 1),
    ("gpt-oss-120b on four cards", PUBLISHED_120B, 4),
    ("gpt-oss-120b on eight cards", PUBLISHED_120B, 8),
)


def weight_bytes(config: GptOssConfig, ranks: int = 1, packed: bool = False) -> int:
    """Of one rank, in BF16; packed: the experts' matrices in MXFP4. What every rank holds whole (norms, router, some
    biases) is not divided."""
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    own_key = key // min(ranks, config.num_key_value_heads)
    attention = (query // ranks + 2 * own_key) * (hidden + 1) + hidden * (query // ranks) + hidden
    attention += config.num_attention_heads // ranks
    router = experts * (hidden + 1)
    matrices = hidden * 2 * inner // ranks + inner * hidden // ranks
    layer = attention + router + experts * (2 * inner // ranks + hidden) + 2 * hidden
    ends = 2 * config.vocab_size * hidden // ranks + hidden
    others = BF16 * (config.num_hidden_layers * layer + ends)
    return others + int(config.num_hidden_layers * experts * matrices * (MXFP4 if packed else BF16))


def kv_bytes_per_token(config: GptOssConfig, ranks: int = 1) -> int:
    """Of one rank."""
    heads = -(-config.num_key_value_heads // ranks)
    return config.num_hidden_layers * 2 * heads * config.head_dim * BF16


def hccl_bytes(ranks: int, buffsize: int = BUFFSIZE) -> int:
    """Bytes that HCCL takes of a card under vllm-ascend 0.11.0 with tensor parallelism. buffsize: HCCL_BUFFSIZE, MB.

    The variable sizes one communicator: the MC2 operators', which every mixture of experts gets, on one card too. That
    of tensor parallelism is made with 200 MB, and what a communicator is made with goes before the variable.
    """
    return 2 * (buffsize + (BUFFSIZE if ranks > 1 else 0)) << 20


@dataclass(frozen=True)
class Fit:
    """One rank's memory, in bytes. `tokens`: what fits beside weights and reserve at the utilisation asked for."""

    weights: int
    kv: int
    total: int
    reserve: int
    tokens: int

    @property
    def needed(self) -> int:
        return self.weights + self.kv

    def fits(self, utilisation: float, reserve: int) -> bool:
        return self.needed + reserve <= self.total * utilisation


def fit(
    config: GptOssConfig,
    ranks: int,
    length: int,
    total: int,
    utilisation: float = UTILISATION,
    packed: bool = False,
    hccl: int = 0,
) -> Fit:
    weights, token = weight_bytes(config, ranks, packed), kv_bytes_per_token(config, ranks)
    room = int(total * utilisation) - weights - RESERVE - hccl
    return Fit(weights, length * token, total, RESERVE + hccl, max(0, room // token))


def gib(size: float) -> str:
    return f"{size / (1 << 20):.0f} MiB" if size < GIB else f"{size / GIB:.1f} GiB"


def thousands(tokens: int) -> str:
    return f"{tokens / 1e6:.1f} million" if tokens >= 1_000_000 else f"{tokens // 1000} thousand"


def settings(config: GptOssConfig, ranks: int, total: int, buffsize: int = BUFFSIZE) -> str:
    """For a card that is nearly full: the settings that fit, and the tokens that each leaves. Empty: none fits."""

    def tokens(utilisation: float, buffsize: int) -> int:
        return fit(config, ranks, 0, total, utilisation, hccl=hccl_bytes(ranks, buffsize)).tokens

    left = {each: tokens(each, buffsize) for each in UTILISATIONS}
    fitting = [f"{each} for {thousands(left[each])}" for each in UTILISATIONS if left[each]]
    if not fitting:
        return ""
    most, half = max(UTILISATIONS), BUFFSIZE // 2
    none = "".join(f"{each} leaves no room, " for each in UTILISATIONS if not left[each])
    words = f"--gpu-memory-utilization {none}{', '.join(fitting)} tokens of context, all requests together"
    more = tokens(most, half) - left[most]
    return f"{words}; HCCL_BUFFSIZE={half} adds {thousands(more)}" if more > 0 else words


def preset_lines(length: int, card: int = CARD) -> tuple[str, ...]:
    """The published models in words, on cards of this size."""
    lines = []
    for name, config, ranks in PRESETS:
        found = fit(config, ranks, length, card, hccl=hccl_bytes(ranks))
        each = " each" if ranks > 1 else ""
        verdict = settings(config, ranks, card) or "does not fit"
        if found.tokens:
            verdict = f"leaves room for about {thousands(found.tokens)} tokens of context, all requests together"
        lines.append(
            f"{name} of {gib(card)}: {gib(found.weights)} of BF16 weights{each}, "
            f"{kv_bytes_per_token(config, ranks) / 1024:.0f} KiB of KV cache a token{each}; {verdict}"
        )
    return tuple(lines)


def memory(
    model: Path | None,
    length: int,
    ranks: int,
    device: Device | None,
    card_memory: int | None = None,
    buffsize: int = BUFFSIZE,
) -> Iterator[Finding]:
    """length: --max-model-len. ranks: --tensor-parallel-size. device: what the probe saw, None when nothing.
    card_memory: --card-memory, bytes of each of `ranks` cards to reckon with in its place, wherever they are.
    buffsize: HCCL_BUFFSIZE, in MB."""
    if card_memory:
        device = Device("npu", "a card (--card-memory)", ranks, card_memory, card_memory)
    on_cpu = device is None or device.kind == "cpu"
    # the presets are of servers on a 910B
    presets = preset_lines(
        length, device.total if not on_cpu and device.kind == "npu" and not device.emulated else CARD
    )
    if model is None:
        yield not_applicable("No --model DIR is given; for the published models:", details=presets)
        return
    try:
        config = GptOssConfig.from_directory(model)
    except InputError:
        yield not_applicable("The checkpoint has no config.json that can be read: see checkpoint.")
        return
    if length > config.max_position_embeddings:
        yield failed(
            f"--max-model-len {length} is more than the checkpoint's {config.max_position_embeddings} positions.",
            f"Ask for at most {config.max_position_embeddings}.",
        )
        return
    if objection := tensor_parallel_objection(config, ranks):
        yield failed(f"{objection}.", "Use 1, 2, 4 or 8.")
        return
    if device is None:
        found = fit(config, ranks, length, 0)
        yield not_applicable(
            f"No device is usable; each of {ranks} would need {gib(found.weights)} for weights and {gib(found.kv)} for "
            f"{length} tokens of KV cache.",
            details=presets,
        )
        return
    yield from _compared(config, ranks, length, device, presets, buffsize)


def _compared(
    config: GptOssConfig, ranks: int, length: int, device: Device, presets: tuple[str, ...], buffsize: int
) -> Iterator[Finding]:
    on_cpu = device.kind == "cpu"
    if ranks > device.count and not on_cpu:
        yield failed(
            f"--tensor-parallel-size {ranks} needs {ranks} devices, torch sees {device.count}.",
            "Ask for fewer, or make more visible (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES, --device of the "
            "container).",
        )
    total = device.free // ranks if on_cpu else device.total
    packed = device.mxfp4 and config.quantization is not None
    what = "weights, experts in MXFP4," if packed else "BF16 weights"
    on_npu = device.kind == "npu"
    hccl = hccl_bytes(ranks, buffsize) if on_npu else 0
    found = fit(config, ranks, length, total, packed=packed, hccl=hccl)
    where = f"of {device.name}"
    if on_cpu:
        where = f"of available memory for {'one process' if ranks == 1 else f'each of {ranks} processes'}"
    sentence = (
        f"{gib(found.weights)} of {what} and {gib(found.kv)} of KV cache for {length} tokens on {gib(total)} {where}"
    )
    usual, most, reserve = (1.0, 1.0, 0) if on_cpu else (UTILISATION, max(UTILISATIONS), found.reserve)
    smaller = "Use more cards (--tensor-parallel-size), or a shorter --max-model-len."
    if on_cpu:
        smaller = "Free memory, use a smaller checkpoint, or a shorter --max-model-len."
    if not found.fits(most, hccl):  # what is certain; the rest of the reserve is a rule of thumb
        yield failed(f"{sentence}: that does not fit{_beside(hccl)}.", smaller, details=presets)
    elif not found.fits(usual, reserve):
        ways = settings(config, ranks, total, buffsize) if on_npu else f"Serve with --gpu-memory-utilization {most}"
        remedy = f"{ways}. If start-up runs out of memory: {smaller.lower()}" if ways and not on_cpu else smaller
        yield warning(f"{sentence}: that is tight{_beside(hccl)}.", remedy, details=presets)
    else:
        context = "" if on_cpu else f"; about {thousands(found.tokens)} tokens of context fit, all requests together"
        yield ok(f"{sentence}{context}.", details=presets)
    if not on_cpu and device.free < device.total * UTILISATION and not device.emulated:
        yield warning(
            f"Only {gib(device.free)} of {gib(device.total)} are free now: something else uses {device.name}.",
            "End it, or choose another card with ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES.",
        )


def _beside(hccl: int) -> str:
    return f" beside {gib(hccl)} of HCCL's buffers and {gib(RESERVE)} for activations and the driver" if hccl else ""
