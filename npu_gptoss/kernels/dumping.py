"""Writes the arguments of kernel calls to files before the calls run (NPU_GPTOSS_DUMP=DIR).

After a crash or a wrong result, the newest file is the call: `npu-gptoss verify --replay FILE` computes it again. Of a
cache a file holds the blocks that the call names, of a layer's experts those that its tokens are routed to, both
renumbered. Each process keeps its newest MOST_FILES files, and writes none above MOST_BYTES. Calls inside a captured
graph are not seen: serve with --enforce-eager.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from npu_gptoss import __version__, envs
from npu_gptoss.errors import InputError
from npu_gptoss.files import reason
from npu_gptoss.kernels.profiling import watch

VARIABLE = "NPU_GPTOSS_DUMP"
FORMAT = "npu_gptoss kernel call 1"
MOST_FILES = 16
MOST_BYTES = 1 << 30
CLASS, FIELDS = "dataclass", "fields"  # of an encoded dataclass

logger = logging.getLogger(__name__)


def install() -> None:
    """Watches every kernel call of this process if the variable names a folder. Raises InputError if none can be
    made of that name."""
    if folder := envs.get(VARIABLE):
        try:
            watch(Dump(Path(folder)))
        except OSError as error:
            said = f"expected a folder that can be written, but {reason(error)}. Give another."
            raise InputError(f"{VARIABLE}={folder}: {said}", field=VARIABLE) from None


class Dump:
    """An observer of kernel calls that writes each call to a file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._calls = 0
        self._files: deque[Path] = deque()
        self._skipped: set[str] = set()

    def __call__(self, name: str, arguments: Mapping[str, Any]) -> None:
        if _capturing():
            return
        self._calls += 1
        with torch.inference_mode():
            kept = with_touched_experts(with_named_blocks(arguments))
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors(kept))
            if size > MOST_BYTES:
                self._skip(name, f"its arguments take {size >> 20} MiB")
                return
            content = {"format": FORMAT, "npu_gptoss": __version__, "kernel": name, "arguments": encoded(kept)}
        path = self._folder / f"{os.getpid()}-{self._calls:08}-{name}.pt"
        part = path.with_suffix(".part")
        try:
            torch.save(content, part)
            part.replace(path)
        except (OSError, RuntimeError) as error:  # torch's own for a full disk; a server goes on
            part.unlink(missing_ok=True)
            self._skip(name, str(error).partition("\n")[0])
            return
        self._files.append(path)
        if len(self._files) > MOST_FILES:
            self._files.popleft().unlink(missing_ok=True)

    def _skip(self, name: str, why: str) -> None:
        if name not in self._skipped:
            logger.warning("%s is not dumped: %s", name, why)
        self._skipped.add(name)


def _capturing() -> bool:
    """A graph is being captured, or traced, on this device: a copy to the host would break it."""
    if torch.compiler.is_compiling():
        return True
    backends = (module for module in (torch.cuda, getattr(torch, "npu", None)) if module is not None)
    return any(module.is_available() and module.is_current_stream_capturing() for module in backends)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors inside."""
    found: list[torch.Tensor] = []
    changed(value, lambda tensor: found.append(tensor) or tensor)
    return found


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy with every tensor inside changed; plans that a kernel cached in metadata are left out."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{n: {} if isinstance(v, dict) else changed(v, change) for n, v in fields.items()}
        )
    if isinstance(value, Mapping):
        return {name: changed(v, change) for name, v in value.items()}
    return tuple(changed(part, change) for part in value) if isinstance(value, tuple) else value


def encoded(value: Any) -> Any:
    """Returns it in types that torch.load takes without running code: tensors on the CPU, dataclasses as dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        kept = {name: encoded(v) for name, v in fields.items() if not isinstance(v, dict)}
        return {CLASS: f"{type(value).__module__}:{type(value).__name__}", FIELDS: kept}
    if isinstance(value, Mapping):
        return {name: encoded(v) for name, v in value.items()}
    return type(value)(map(encoded, value)) if isinstance(value, (list, tuple)) else value


def with_named_blocks(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The caches with only the blocks that the block table and the slots name. Wrong numbers stay out of range."""
    cache, metadata = arguments.get("key_cache"), arguments.get("metadata")
    slots = getattr(metadata, "slot_mapping", arguments.get("slot_mapping"))
    if cache is None or slots is None:
        return arguments
    count, size = cache.shape[:2]
    table = getattr(metadata, "block_table", slots.new_empty(0))
    named = torch.cat((table.flatten().long(), torch.div(slots.long(), size, rounding_mode="floor")))
    used = named[(named >= 0) & (named < count)].unique()
    number = torch.full((count,), -1, dtype=torch.int64, device=cache.device)
    number[used] = torch.arange(len(used), device=cache.device)

    def renumbered(blocks: torch.Tensor) -> torch.Tensor:
        there = number[blocks.long().clamp(0, count - 1)]
        outside = torch.where(blocks < 0, blocks.long(), blocks.long() - count + len(used))
        return torch.where((blocks >= 0) & (blocks < count), there, outside)

    moved = (renumbered(torch.div(slots, size, rounding_mode="floor")) * size + slots % size).to(slots.dtype)
    found = {**arguments, **{name: arguments[name][used] for name in ("key_cache", "value_cache")}}
    if metadata is None:
        return {**found, "slot_mapping": moved}
    table = renumbered(table).to(table.dtype)
    return {**found, "metadata": dataclasses.replace(metadata, block_table=table, slot_mapping=moved)}


def with_touched_experts(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A layer's experts without those that no token is routed to; ids of experts on other ranks stay such."""
    weights, ids = arguments.get("weights"), arguments.get("topk_ids")
    if ids is None or not dataclasses.is_dataclass(weights):
        return arguments
    known = {field.name for field in dataclasses.fields(weights)}
    places = getattr(weights, "expert_map", None)
    first, last = getattr(weights, "expert_range", (0, weights.num_experts))
    held = last - first
    total = len(places) if places is not None else weights.num_experts
    inside = (ids >= 0) & (ids < total)
    local = ids.long().clamp(0, total - 1)
    local = places.long()[local] if places is not None else local - first
    local = torch.where(inside & (local >= 0) & (local < held), local, -1)
    used = local[local >= 0].unique()
    used = used if len(used) else used.new_zeros(1)
    number = torch.full((held,), -1, dtype=torch.int64, device=ids.device)
    number[used] = torch.arange(len(used), device=ids.device)
    is_part = places is not None or held < total
    elsewhere = torch.where(
        inside, len(used), torch.where(ids < 0, ids.long(), ids.long() - total + len(used) + is_part)
    )
    renumbered = torch.where(local >= 0, number[local.clamp(min=0)], elsewhere).to(ids.dtype)

    def of_used(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[0] != held:
            return tensor
        plain = {torch.uint16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype, tensor.dtype)
        return tensor.view(plain)[used].view(tensor.dtype)  # not every dtype can be indexed

    fields = {name: changed(getattr(weights, name), of_used) for name in known if name != "expert_map"}
    if places is not None:
        map_of_used = torch.tensor([*range(len(used)), -1], dtype=places.dtype, device=places.device)
        fields["expert_map"] = map_of_used
    if "expert_range" in known:
        fields |= {"expert_range": (0, len(used)), "num_experts": len(used) + is_part}
    elif "num_experts" in known:
        fields["num_experts"] = len(used)
    return {**arguments, "weights": dataclasses.replace(weights, **fields), "topk_ids": renumbered}
