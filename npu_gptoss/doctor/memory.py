"""Predicts a server's device memory with the same arithmetic that the server uses
(`npu_gptoss.model.device_memory`), and counts the streams that captured graphs take on a 910B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, on_ascend, warning
from npu_gptoss.doctor.machine import Device, Machine
from npu_gptoss.errors import InputError
from npu_gptoss.model import device_memory
from npu_gptoss.model.config import GptOssConfig, published_config, tensor_parallel_objection, uncut_objection
from npu_gptoss.model.device_memory import (
    BUFFSIZE,
    UTILISATION,
    UTILISATIONS,
    Choice,
    Fit,
    Part,
    choose,
    fit,
    gib,
    thousands,
)
from npu_gptoss.nominal import MEMORY, kind_of
from npu_gptoss.serving.ascend import sizes

CARD = MEMORY["910B3"]
# tokens of two overlapping steps of scripts/serve.sh, where layers with a window keep no more than that beside it
IN_FLIGHT = 2 * 4096

PUBLISHED_20B, PUBLISHED_120B = published_config(), published_config(36, experts=128)
PRESETS = (
    ("gpt-oss-20b on one card", PUBLISHED_20B, 1),
    *((f"gpt-oss-120b on {number} cards", PUBLISHED_120B, n) for number, n in (("two", 2), ("four", 4), ("eight", 8))),
)
SIXTEEN = (("gpt-oss-120b on sixteen dies", PUBLISHED_120B, 16),)


@dataclass(frozen=True)
class Cards:
    """A model on so many cards of one size. length: --max-model-len. buffsize: HCCL_BUFFSIZE, in MB. in_flight: as of
    `kv_bytes`."""

    config: GptOssConfig
    ranks: int
    length: int
    total: int
    buffsize: int = BUFFSIZE
    in_flight: int | None = None

    def choice(self, utilisation: float = UTILISATION, **how: Any) -> Choice:
        """A server's decision. how: as of `choose`."""
        how = {"hccl": device_memory.hccl_bytes(self.ranks, self.buffsize), "in_flight": self.in_flight} | how
        return choose(self.config, Part.of(self.config, self.ranks), self.length, self.total, utilisation, **how)

    def settings(self, packed: bool = False) -> str:
        """Returns the settings that fit nearly full cards, and the tokens that each leaves. Empty: none fits."""

        def tokens(cards: Cards, utilisation: float) -> int:
            choice = cards.choice(utilisation)
            return (choice.kept if packed else choice.expanded).tokens

        left = {each: tokens(self, each) for each in UTILISATIONS}
        fitting = [f"{each} for {thousands(left[each])}" for each in UTILISATIONS if left[each]]
        if not fitting:
            return ""
        most, half = max(UTILISATIONS), BUFFSIZE // 2
        none = "".join(f"{each} leaves no room, " for each in UTILISATIONS if not left[each])
        words = f"--gpu-memory-utilization {none}{', '.join(fitting)} tokens of context, all requests together"
        more = tokens(replace(self, buffsize=half), most) - left[most]
        return f"{words}; HCCL_BUFFSIZE={half} adds {thousands(more)}" if more > 0 else words


def packed_line(choice: Choice) -> str:
    """The memory of an MXFP4 checkpoint's packed experts, in words."""
    left = f"about {thousands(choice.kept.tokens)} tokens" if choice.kept.tokens else "no room"
    return f"packed in MXFP4 {gib(choice.kept.weights)} of weights, which leave {left}"


def _token(size: int, in_flight: int | None) -> str:
    return f"{size / 1024:.0f} KiB" if in_flight is None else f"{size / 2048:.0f} to {size / 1024:.0f} KiB"


def preset_lines(length: int, card: int = CARD, dies: bool = False, in_flight: int | None = None) -> tuple[str, ...]:
    """The published models in words, on cards of this size; dies: of an A3, which has sixteen."""
    lines = []
    for name, config, ranks in (*PRESETS, *(SIXTEEN if dies else ())):
        cards = Cards(config, ranks, length, card, in_flight=in_flight)
        choice = cards.choice()
        found, token = choice.expanded, device_memory.kv_bytes_per_token(config, Part.of(config, ranks))
        each = " each" if ranks > 1 else ""
        verdict = f"leaves room for about {thousands(found.tokens)} tokens of context, all requests together"
        if not found.tokens:
            verdict = cards.settings() or "does not fit"
        lines.append(
            f"{name} of {gib(card)}: {gib(found.weights)} of BF16 weights{each}, "
            f"{_token(token, in_flight)} of KV cache a token{each}; {verdict}; {packed_line(choice)}"
        )
    return tuple(lines)


def memory(
    model: Path | None,
    length: int,
    ranks: int,
    device: Device | None,
    card_memory: int | None = None,
    buffsize: int = BUFFSIZE,
    triton: bool = False,
    wish: str = device_memory.AUTO,
    in_flight: int | None = None,
) -> Iterator[Finding]:
    """length: --max-model-len. ranks: --tensor-parallel-size. device: of the probe, None without one. card_memory:
    --card-memory, bytes of each of `ranks` cards to compute with instead. buffsize: HCCL_BUFFSIZE, in MB. triton:
    Triton-Ascend is installed. wish: NPU_GPTOSS_EXPERT_WEIGHTS. in_flight: as of `kv_bytes`, on an NPU."""
    if card_memory:
        device = Device("npu", "a card (--card-memory)", ranks, card_memory, card_memory)
    on_cpu = device is None or device.kind == "cpu"
    # the presets are of servers on a 910B
    npu = None if on_cpu or device.kind != "npu" else device
    presets = preset_lines(
        length,
        npu.total if npu and not npu.emulated else CARD,
        npu is not None and (kind_of(npu.name) == "A3" or card_memory == MEMORY["A3"]),
        in_flight,
    )
    if model is None:
        yield not_applicable("No --model DIR is given; for the published models:", details=presets)
        return
    try:
        config = GptOssConfig.from_directory(model)
    except InputError:
        yield not_applicable("The checkpoint has no config.json that can be read: see checkpoint.")
        return
    if length > (most := config.max_position_embeddings):
        sentence = f"--max-model-len {length} is more than the checkpoint's {most} positions."
        yield failed(sentence, f"Ask for at most {most}.")
        return
    if objection := tensor_parallel_objection(config, ranks):
        yield failed(f"{objection.finding}.", objection.advice)
        return
    if device is None:
        found = Cards(config, ranks, length, 0).choice().expanded
        need = f"{gib(found.weights)} for weights and {gib(found.kv)} for {length} tokens of KV cache"
        yield not_applicable(f"No device is usable; each of {ranks} would need {need}.", details=presets)
        return
    if ranks > device.count and not on_cpu:
        remedy = "Ask for fewer, or make more visible (ASCEND_RT_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES, a container's)."
        yield failed(f"--tensor-parallel-size {ranks} needs {ranks} devices, torch sees {device.count}.", remedy)
    if device.kind == "npu":
        objection = "" if triton else "Triton-Ascend is not installed"
        if config.quantization is None:
            objection = "the checkpoint's experts are not in MXFP4"
        cards = Cards(config, ranks, length, device.total, buffsize, in_flight)
        yield _on_npu(cards, device, cards.choice(objection=objection, wish=wish), presets)
    else:
        if device.mxfp4 and config.quantization and (uncut := uncut_objection(config.intermediate_size, ranks)):
            yield warning(f"{uncut.finding}.", uncut.advice)
        yield _elsewhere(config, ranks, length, device, presets)
    if not on_cpu and device.free < device.total * UTILISATION and not device.emulated:
        used = f"Only {gib(device.free)} of {gib(device.total)} are free now: something else uses {device.name}."
        yield warning(used, "End it, or choose another card by ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES.")


SMALLER = "Use more cards (--tensor-parallel-size), or a shorter --max-model-len."


def _what_takes_what(found: Fit, what: str, where: str) -> str:
    return (
        f"{gib(found.weights)} of {what} and {gib(found.kv)} of KV cache for {found.length} tokens on "
        f"{gib(found.total)} {where}"
    )


def _context(found: Fit) -> str:
    return f"about {thousands(found.tokens)} tokens of context fit, all requests together"


def _on_npu(cards: Cards, device: Device, choice: Choice, presets: tuple[str, ...]) -> Finding:
    """A server's decision on an NPU, at vLLM's default utilisation."""
    found, other, more = choice.fit, "", ""
    what = "weights, experts packed in MXFP4 and one layer's in BF16," if choice.packed else "BF16 weights"
    sentence = _what_takes_what(found, what, f"of {device.name}")
    beside = (
        f" beside {gib(found.hccl)} of HCCL's buffers and {gib(device_memory.RESERVE)} for activations and the driver"
    )
    if not choice.packed and cards.config.quantization is not None:
        other = f"Experts {packed_line(choice)} ({choice.objection or f'{device_memory.VARIABLE}=packed'}). "
        more = other if choice.kept.tokens > found.tokens else ""
    if not found.fits(max(UTILISATIONS), 0):  # the certain part; the reserve is a rule of thumb
        return failed(f"{sentence}: that does not fit{beside}.", f"{more}{SMALLER}", details=presets)
    if not found.fits():
        ways = cards.settings(choice.packed)
        remedy = f"{ways}. If start-up runs out of memory: {SMALLER.lower()}" if ways else SMALLER
        return warning(f"{sentence}: that is tight{beside}.", f"{more}{remedy}", details=presets)
    return ok(f"{sentence}; {_context(found)}.", details=(other.strip(), *presets) if other else presets)


def _elsewhere(config: GptOssConfig, ranks: int, length: int, device: Device, presets: tuple[str, ...]) -> Finding:
    """A CPU, or a GPU with the offline engine, which computes with experts in MXFP4."""
    packed = device.mxfp4 and config.quantization is not None
    what = "weights, experts in MXFP4," if packed else "BF16 weights"
    if device.kind == "cpu":
        found = fit(config, Part.of(config, ranks), length, device.free // ranks, packed=packed)
        processes = "one process" if ranks == 1 else f"each of {ranks} processes"
        sentence = _what_takes_what(found, what, f"of available memory for {processes}")
        if found.fits(1.0, 0):
            return ok(f"{sentence}.", details=presets)
        smaller = "Free memory, use a smaller checkpoint, or a shorter --max-model-len."
        return failed(f"{sentence}: that does not fit.", smaller, details=presets)
    most = max(UTILISATIONS)
    found = fit(config, replace(Part.of(config, ranks), whole_embedding=True), length, device.total, packed=packed)
    sentence = _what_takes_what(found, what, f"of {device.name}")
    if not found.fits(most, 0):
        return failed(f"{sentence}: that does not fit.", SMALLER, details=presets)
    if not found.fits():
        remedy = f"Serve with --gpu-memory-utilization {most}. If start-up runs out of memory: {SMALLER.lower()}"
        return warning(f"{sentence}: that is tight.", remedy, details=presets)
    return ok(f"{sentence}; {_context(found)}.", details=presets)


# --- dispatch to experts


@on_ascend("a buffer to send rows to experts")
def expert_buffer(
    here: Machine, model: Path | None, ranks: int, max_num_seqs: int, devices: Sequence[Device]
) -> Iterator[Finding]:
    """HCCL_BUFFSIZE against what CANN's dispatch needs on an A3. An A2 with fewer than 16 cards gathers all rows."""
    if not devices:
        yield not_applicable("No device is usable.")
        return
    if kind_of(devices[0].name) != "A3":
        yield ok(f"{devices[0].name} gathers all rows; only an A3 sends them to experts through HCCL_BUFFSIZE.")
        return
    try:
        config = GptOssConfig.from_directory(model) if model else PUBLISHED_120B
    except InputError:
        yield not_applicable("The checkpoint has no config.json that can be read: see checkpoint.")
        return
    given, dies = device_memory.buffsize(here.environ), ranks if ranks > 1 else devices[0].count
    layouts = {
        f"--tensor-parallel-size {dies}": -(-max_num_seqs // dies),
        f"--data-parallel-size {dies}": max_num_seqs,
    }
    for layout, rows in layouts.items():
        if dies < 2 or config.num_local_experts % dies:
            yield not_applicable(f"{config.num_local_experts} experts are not shared out by {dies} dies.")
            return
        needed = device_memory.mc2_buffsize(config, min(rows, 512))
        name = "" if model else "gpt-oss-120b, "
        sentence = f"{name}{layout} --enable-expert-parallel --max-num-seqs {max_num_seqs} needs HCCL_BUFFSIZE {needed}"
        if needed <= given:
            yield ok(f"{sentence}; it is {given}.")
        else:
            remedy = f"Set HCCL_BUFFSIZE={needed} on all ranks for this layout, or lower --max-num-seqs."
            yield warning(f"{sentence}, and it is {given}: the start would be refused.", remedy)


# --- captured graphs

AIV_VARIABLE = "HCCL_OP_EXPANSION_MODE"


@on_ascend("a budget of streams")
def graphs(here: Machine, model: Path | None, ranks: int, max_num_seqs: int) -> Iterator[Finding]:
    aiv = here.environ.get(AIV_VARIABLE) == "AIV"
    if not here.release.reckons_streams:
        after = "since CANN 8.5 a graph takes few streams (vllm-ascend PR 9962)"
        yield not_applicable(f"vllm-ascend {here.release.vllm_ascend.recommended} counts no streams: {after}.")
        return
    if model is not None:
        try:
            models = [("", GptOssConfig.from_directory(model).num_hidden_layers, ranks)]
        except InputError:
            yield not_applicable("The checkpoint has no config.json that can be read: see checkpoint.")
            return
    else:
        published = (("gpt-oss-20b", PUBLISHED_20B, 1), ("gpt-oss-120b", PUBLISHED_120B, 4))
        models = [(name, config.num_hidden_layers, cards) for name, config, cards in published]
    for name, layers, cards in models:
        yield _budget(name, layers, cards, max_num_seqs, aiv)


def _budget(name: str, layers: int, ranks: int, max_num_seqs: int, aiv: bool) -> Finding:
    asked = sizes.capture_sizes(max_num_seqs)
    groups = int(ranks > 1)
    most = sizes.most_sizes(layers, groups=groups, aiv=aiv)
    streams = sizes.streams(len(asked), layers, groups=groups, aiv=aiv)
    what = f"{layers} layers on {ranks} card{'s' if ranks > 1 else ''}"
    sentence = (
        f"{what}, --max-num-seqs {max_num_seqs}: {len(asked)} sizes are captured, {streams} streams by the reckoning "
        f"of vllm-ascend 0.11.0; it uses at most {sizes.BUDGET} of a device's {sizes.STREAMS}, so {most} sizes fit"
    )
    if len(asked) <= most:
        return ok(f"{sentence}.", subject=name)
    then = "it thins them out: steps in between are padded to the next size"
    remedy = (
        'Name the sizes that you use: --compilation-config \'{"cudagraph_mode": "PIECEWISE", '
        '"cudagraph_capture_sizes": [16, 10, 4, 2, 1]}\'. Servers that share a card share the streams.'
    )
    if groups and not aiv:
        remedy += f" {AIV_VARIABLE}=AIV leaves room for more (not with data parallelism, where it can hang)."
    return warning(f"{sentence}, and {then}.", remedy, subject=name)
