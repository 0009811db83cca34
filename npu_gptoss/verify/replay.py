"""Computes a dumped kernel call again (`npu-gptoss verify --replay FILE`): every kernel that can run here, and the fp32
definition on the CPU.

A file holds a kernel's own arguments (`npu_gptoss.kernels.dumping`). They become the arguments of the public operation
again: a layout that a kernel made of the experts' weights is turned back into the official one.
"""

from __future__ import annotations

import dataclasses
import importlib
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.files import mode_of
from npu_gptoss.kernels import current_platform
from npu_gptoss.kernels.dumping import CLASS, FIELDS, FORMAT, changed, tensors
from npu_gptoss.kernels.profiling import observing
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import AnyExperts, ExpertWeights, Mxfp4Experts, packed
from npu_gptoss.moe.ascend import AscendExperts
from npu_gptoss.moe.triton.layout import TiledExperts
from npu_gptoss.verify.attention_cases import one_key_each
from npu_gptoss.verify.cases import Inputs, on
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.compare import Result, checked
from npu_gptoss.verify.moe_cases import expert_map
from npu_gptoss.verify.untiled import untiled


@dataclasses.dataclass(frozen=True)
class Dumped:
    """A call as it was dumped. kernel: the chosen one. inputs: of the public operation, on the CPU."""

    operation: str
    kernel: str
    release: str
    inputs: Inputs

    @property
    def precision(self) -> str:
        return "bfloat16" if any(t.dtype == torch.bfloat16 for t in tensors(self.inputs)) else "float32"


def read(path: Path) -> Dumped:
    """Raises InputError for a file that holds no call, or a call that cannot be turned back."""
    if not stat.S_ISREG(mode_of(path)):
        raise InputError(f"--replay {path}: there is no such file; NPU_GPTOSS_DUMP=DIR lets a server write some")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        name, release, kept = (content[key] for key in ("kernel", "npu_gptoss", "arguments"))
    except Exception:  # the unpickler raises whatever a foreign file's bytes lead to
        raise InputError(f"--replay {path}: expected a kernel call that NPU_GPTOSS_DUMP wrote, got another") from None
    if content.get("format") != FORMAT:
        raise InputError(f"--replay {path}: expected the format {FORMAT!r}, got {content.get('format')!r}")
    operation = next((each for each in CHECKS if name.startswith(f"{each}.")), "")
    if not operation:
        raise InputError(f"--replay {path}: there is no check of the kernel {name}")
    return Dumped(operation, name, release, public(operation, _decoded(kept)))


def _decoded(value: Any) -> Any:
    """The inverse of `dumping.encoded`; only dataclasses of this package are made again."""
    if isinstance(value, Mapping) and CLASS in value:
        module, _, name = value[CLASS].partition(":")
        found = getattr(importlib.import_module(module), name, None) if module.startswith("npu_gptoss.") else None
        if not dataclasses.is_dataclass(found):
            raise InputError(f"a dumped call names {value[CLASS]}, which is no data of this npu-gptoss")
        return found(**_decoded(value[FIELDS]))
    if isinstance(value, Mapping):
        return {name: _decoded(v) for name, v in value.items()}
    return type(value)(map(_decoded, value)) if isinstance(value, (list, tuple)) else value


def results(dumped: Dumped, device: torch.device) -> Iterator[Result | tuple[str, str]]:
    """A result for each kernel that can run the call on this device; (name, reason) for each other kernel."""
    check = CHECKS[dumped.operation]
    want, sizes = check.wanted(dumped.inputs, dumped.precision)
    for kernel in registry.kernels_of(check.operation):
        if reasons := kernel.capability.reasons_against(current_platform()):
            yield kernel.name, reasons[0]
            continue
        ran: set[str] = set()
        with observing(lambda name, _, ran=ran: ran.add(name)):
            result, _ = checked(
                kernel.name,
                lambda name=kernel.name: changed(check.run(on(dumped.inputs, device), name), lambda t: t.cpu()),
                lambda got: check.judge(got, want, dumped.precision, sizes),
            )
        # an override that cannot take the call leaves it to another kernel, or to none
        because = f": {result.lines[0]}" if result.wrong else ""
        yield result if kernel.name in ran else (kernel.name, f"cannot run this call{because}")


# --- from a kernel's arguments to those of the public operation


# arguments of a kernel that the public operation makes itself
MADE = {
    **dict.fromkeys(("attention.paged", "dense.logits", "dense.greedy"), ("out",)),
    "attention.write_kv": ("slot_mapping",),
    "dense.rotate_write": ("slot_mapping", "query"),
    "dense.token": ("shortlist",),
}


def public(operation: str, arguments: dict[str, Any]) -> Inputs:
    """The arguments of the public operation, from those of its kernel."""
    inputs = {name: value for name, value in arguments.items() if name not in MADE.get(operation, ())}
    if "slot_mapping" in arguments:
        inputs["metadata"] = one_key_each(arguments["slot_mapping"])
    if operation == "moe.experts":
        inputs["weights"] = official(inputs["weights"])
    if operation == "moe.expand":
        blocks, scales = packed.blocks_of(inputs.pop("packed"))
        inputs |= {"blocks": blocks, "scales": scales, "halves": False}
    return inputs


def official(weights: Any) -> AnyExperts:
    """The experts in the layout that a checkpoint has, of any kernel's layout."""
    if isinstance(weights, TiledExperts):
        return untiled(weights)
    if not isinstance(weights, AscendExperts):
        return weights
    places = None if weights.all_local else expert_map(weights.num_experts, *weights.expert_range)
    biases = {"gate_up_proj_bias": _interleaved(weights.gate_up_proj_bias)}
    biases["down_proj_bias"] = weights.down_proj_bias / weights.gain
    rest = {**{name: bias.to(weights.gate_up_proj.dtype) for name, bias in biases.items()}, "expert_map": places}
    if weights.packed is None:
        return ExpertWeights(_interleaved(weights.gate_up_proj), down_proj=weights.down_proj, **rest)
    (blocks, scales), down = (packed.blocks_of(matrix) for matrix in weights.packed)
    gate_up = (torch.stack(t.chunk(2, 1), 2).flatten(1, 2) for t in (blocks, scales))
    names = ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
    return Mxfp4Experts(**dict(zip(names, (*gate_up, *down), strict=True)), **rest)


def _interleaved(halves: torch.Tensor) -> torch.Tensor:
    """All of gate, then all of up -> gate, up, gate, up …, along the last axis."""
    return torch.stack(halves.chunk(2, -1), -1).flatten(-2)
