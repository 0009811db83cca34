"""Writes the converted checkpoint a shard at a time: one shard a layer, so that memory holds about one layer.

OUT appears whole or not at all. Until then everything lies beside it in `.OUT.converting`, where a finished shard is
named in progress.json with the command's fingerprint: the same command goes on behind it. The bytes do not depend on
interruptions.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from npu_gptoss.convert.lora import CONFIG as ADAPTER_CONFIG
from npu_gptoss.convert.lora import Adapter, merged
from npu_gptoss.convert.source import KEPT_SCALES, Source
from npu_gptoss.engine.device import one_thread
from npu_gptoss.errors import InputError, short
from npu_gptoss.files import reason, write_atomically
from npu_gptoss.model.config import CONFIG_NAME, MXFP4
from npu_gptoss.model.layout import PACKED, expected_tensors, split_layer
from npu_gptoss.model.safetensors_reader import INDEX_NAME, read_tensor
from npu_gptoss.moe.mxfp4 import GROUP, compress, expand
from npu_gptoss.progress import bar

FORMAT = 1  # of the result; raised when the same input gives other bytes
PROGRESS = "progress.json"
_COPIED = """
    tokenizer* special_tokens_map.json added_tokens.json vocab.json merges.txt generation_config.json chat_template*
    *.tiktoken LICENSE* USAGE_POLICY*
"""
_STEP = 1 << 22  # elements that are compared at once
_GB = 1e9


@dataclass
class Change:
    """The distance of the result from the source: sums of squares, and the largest difference."""

    error: float = 0.0
    size: float = 0.0
    largest: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        rows = max(1, _STEP * len(before) // before.numel())
        for was, became in zip(before.split(rows), after.split(rows), strict=True):
            difference = became.float() - was.float()
            self.error += torch.linalg.vector_norm(difference).item() ** 2
            self.size += torch.linalg.vector_norm(was, dtype=torch.float32).item() ** 2
            self.largest = max(self.largest, *(abs(value.item()) for value in torch.aminmax(difference)))

    def join(self, other: Change) -> None:
        self.error, self.size = self.error + other.error, self.size + other.size
        self.largest = max(self.largest, other.largest)

    @property
    def relative(self) -> float:
        return math.sqrt(self.error / self.size) if self.size else 0.0


@dataclass
class Job:
    """A conversion. to: "mxfp4" or "bf16". changes: by kind of tensor, filled while it runs."""

    source: Source
    out: Path
    to: str
    adapters: list[Adapter] = field(default_factory=list)
    changes: dict[str, Change] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = replace(self.source.config, quantization=MXFP4 if self.to == "mxfp4" else None)
        self.specs = expected_tensors(self.config)
        self.staging = self.out.parent / f".{self.out.name}.converting"

    @property
    def shards(self) -> dict[str, list[str]]:
        """Official names by file: the embedding, each layer, the head."""
        groups: dict[object, list[str]] = {}
        for name in self.specs:  # those outside of layers: the embedding comes first, norm and head last
            layer = split_layer(name)[0]
            groups.setdefault((layer, not groups) if layer is None else layer, []).append(name)
        return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups.values(), 1)}

    def size(self, name: str) -> int:
        spec = self.specs[name]
        return math.prod(spec.shape) * spec.dtypes[0].itemsize

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the command and its inputs as they were when it began."""
        files = [*self.source.files, self.source.directory / CONFIG_NAME]
        for adapter in self.adapters:
            files += [*adapter.files, adapter.directory / ADAPTER_CONFIG]
        facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists()]
        asked = [FORMAT, self.to, self.config.to_dict(), [a.weight for a in self.adapters], facts]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def convert(job: Job, *, progress: bool = True) -> int:
    """Writes job.out. Returns how many shards an interrupted run had left. Raises InputError."""
    try:
        if job.out.exists():
            job.out.rmdir()  # hours later a mounted folder would give its name to no other
    except OSError as error:
        said = f"{job.out}: expected a folder that is new, or empty and not mounted, but {reason(error)}"
        raise InputError(f"{said}. Name another, such as a new one in it.", field="OUT") from None
    with _words(job), _locked(job), one_thread():  # experts are shared out to the cores
        done = _resumed(job)
        shards, before = job.shards, len(done)
        needed = sum(job.size(name) for file, names in shards.items() if file not in done for name in names)
        if needed > (free := shutil.disk_usage(job.staging).free):
            raise OSError(errno.ENOSPC, f"{needed / _GB:.1f} GB are needed and {free / _GB:.1f} GB free")
        with bar(len(shards), "converting", "shard", shown=progress) as shows:
            shows.update(before)
            for file, names in shards.items():
                if file not in done:
                    tensors, kept, changes = _made(job, names)
                    _write(job.staging / file, tensors)
                    if kept:
                        (job.staging / KEPT_SCALES).mkdir(exist_ok=True)
                        _write(job.staging / KEPT_SCALES / file, kept)
                    del tensors, kept
                    done[file] = {kind: [c.error, c.size, c.largest] for kind, c in changes.items()}
                    _note(job, done)
                    shows.update()
        for each in done.values():
            for kind, values in each.items():
                job.changes.setdefault(kind, Change()).join(Change(*values))
        _finish(job, shards)
    return before


def _made(job: Job, names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Change]]:
    """A shard's tensors, the scales that its experts had before they became floats, and what changed."""
    tensors: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}
    changes: dict[str, Change] = {}
    source = job.source
    for name in dict.fromkeys(PACKED.sub(r"\g<name>", name) for name in names):
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        packed, quantised = blocks in source.pieces, blocks in job.specs
        touched = any(name in (*adapter.deltas, *adapter.replaced) for adapter in job.adapters)
        had = source.read(scales) if packed else read_tensor(source.kept[scales]) if scales in source.kept else None
        if packed and quantised and not touched:
            tensors[blocks], tensors[scales] = source.read(blocks), had
            continue
        floats = _expanded(source.read(blocks), had) if packed else source.read(name)
        change = Change()
        if touched:
            before, floats = floats.clone(), merged(name, floats, job.adapters)
            change.add(before, floats)
        elif floats.dtype != torch.bfloat16:
            change.add(floats, floats.to(torch.bfloat16))
        floats = floats.to(torch.bfloat16)
        if not torch.isfinite(torch.stack(torch.aminmax(floats))).all():
            raise InputError(f"{name}: expected finite values, got NaN or infinity. The input is damaged.", field=name)
        if quantised:
            tensors[blocks], tensors[scales], change = _quantised(floats, had)
        else:
            tensors[name] = floats
            kept |= {} if had is None else {scales: had}
        if change.error:
            changes.setdefault(split_layer(name)[1], Change()).join(change)
    return tensors, kept, changes


def _by_expert(one: Callable[[int], Any], count: int) -> list[Any]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, range(count)))


def _expanded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 to the BF16 layout, [experts, in, out]."""
    experts, rows, groups, _ = blocks.shape
    out = torch.empty((experts, groups * GROUP, rows), dtype=torch.bfloat16)
    _by_expert(lambda expert: out[expert].copy_(expand(blocks[expert], scales[expert]).t()), experts)
    return out


def _quantised(floats: torch.Tensor, had: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, Change]:
    """[experts, in, out] bfloat16 to blocks and scales by the published recipe. had: the scales of before, or None."""

    def one(expert: int) -> tuple[torch.Tensor, torch.Tensor, Change]:
        rows, change = floats[expert].t().contiguous(), Change()
        blocks, scales = compress(rows, published=True, kept=None if had is None else had[expert])
        change.add(rows, expand(blocks, scales))
        return blocks, scales, change

    blocks, scales, changes = zip(*_by_expert(one, len(floats)), strict=True)
    whole = Change()
    for change in changes:
        whole.join(change)
    return torch.stack(blocks), torch.stack(scales), whole


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Whole or not at all, and on the disk before it is noted."""
    temporary = file.with_name(f".{file.name}")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata={"format": "pt"})
        temporary.chmod(0o644)  # safetensors makes files that nobody else can read
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _note(job: Job, done: Mapping[str, Any]) -> None:
    write_atomically(job.staging / PROGRESS, json.dumps({"fingerprint": job.fingerprint, "shards": done}).encode())


def _resumed(job: Job) -> dict[str, Any]:
    """The shards that an interrupted run of the same command has finished; what another one left is deleted."""
    for path in job.staging.rglob(".*"):  # half a file, which SIGKILL left
        if path.name != ".lock":
            path.unlink()
    try:
        noted = json.loads((job.staging / PROGRESS).read_bytes())
        if noted["fingerprint"] == job.fingerprint:
            return {file: changes for file, changes in noted["shards"].items() if (job.staging / file).is_file()}
    except (OSError, ValueError, KeyError):
        pass
    for path in job.staging.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return {}


def _finish(job: Job, shards: Mapping[str, list[str]]) -> None:
    """The small files, then the name."""
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(map(job.size, weight_map))}, "weight_map": dict(sorted(weight_map.items()))}
    for name, values in ((INDEX_NAME, index), (CONFIG_NAME, job.config.to_dict())):
        write_atomically(job.staging / name, (json.dumps(values, indent=2) + "\n").encode())
    for folder in reversed(job.source.folders):
        for pattern in _COPIED.split():
            for file in folder.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, job.staging / file.name)
    for name in (PROGRESS, ".lock"):
        (job.staging / name).unlink(missing_ok=True)
    job.staging.replace(job.out)


@contextmanager
def _locked(job: Job) -> Iterator[None]:
    """Two runs would write over each other."""
    job.staging.mkdir(parents=True, exist_ok=True)
    with (job.staging / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{job.out}: another run writes it. Wait for it, or stop it.", field="OUT") from None
        except OSError:
            pass  # a file system without locks, such as Lustre
        yield


@contextmanager
def _words(job: Job) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:  # the library has a class of its own for a full disk
        why = getattr(error, "strerror", None) or short(str(error))
        goes_on = f" the same command goes on where it stopped. `rm -r {shlex.quote(str(job.staging))}` gives the"
        rest = f"Make room, or name another folder;{goes_on} space back." if job.staging.is_dir() else "Name another."
        raise InputError(f"{job.out} cannot be written: {why}. {rest}", field="OUT") from None
