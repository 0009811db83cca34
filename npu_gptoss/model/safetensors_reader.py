"""Finds and reads the safetensors files of a checkpoint directory, headers first.

Contract: the safetensors format (8 bytes of header length, a JSON header, then the tensors' bytes without gaps) and the
sharding of the Hugging Face hub (`model.safetensors`, or shards named by `model.safetensors.index.json`).

Everything that can be wrong with the files' structure is found from headers and file sizes, before a byte of any tensor
is read, and each finding names the file. Nothing is memory-mapped: each tensor is read into separate memory, so that
the process holds only the tensors it asked for, and a file that shrinks meanwhile is an error, not a crash. Pickles
(.bin, .pt, .pth) are never opened: loading one runs the code in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.errors import quoted, short
from npu_gptoss.files import (
    MOST_HEADER_BYTES,
    CheckpointError,
    is_directory,
    is_there,
    parse_json,
    read_json,
    reason,
    wrong,
)
from npu_gptoss.model.foreign import refuse_foreign

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_PATTERN = "model-*-of-*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MOST_AXES = 8
_MOST_NAME = 255  # bytes of a file's name, on every file system that a checkpoint lies on
_AGAIN = "The download is incomplete or damaged: download the file again."
_LFS_POINTER = b"version https://git-lfs"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # scales of MXFP4: the same bytes
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def listed(names: Iterable[str]) -> str:
    """The first three names, and how many more there are."""
    names = list(names)
    return ", ".join(map(short, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor. `dtype` is None where the file's name for it (`dtype_name`) has no torch equivalent."""

    name: str
    file: Path
    dtype_name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    size: int  # bytes


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint directory, from the headers of its files. Raises CheckpointError."""
    here = str(directory)
    if not is_directory(directory):
        raise wrong(directory, "expected a checkpoint's directory, but there is none. Check the path.", here)
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if is_there(index):
        return _read_shards(directory, _read_index(index))
    if not is_there(single):
        refuse_foreign(directory)
        raise wrong(directory, f"expected {SINGLE_NAME} or {INDEX_NAME}, got {_what_else(directory)}", here)
    stray = sorted(file.name for file in directory.glob("*.safetensors") if file != single)
    if stray:  # vLLM would read them too
        said = f"expected {SINGLE_NAME} alone, got {listed(stray)} too and no index."
        raise wrong(directory, f"{said} Delete what does not belong here, or get the index.", here)
    return read_header(single)


def stored_names(directory: Path) -> list[str]:
    """Returns the names of a checkpoint's tensors, unchecked; none where they cannot be read."""
    try:
        index = directory / INDEX_NAME
        return list(_read_index(index) if is_there(index) else read_header(directory / SINGLE_NAME))
    except CheckpointError:
        return []


def weight_files(directory: Path) -> list[Path]:
    """Returns the files of a checkpoint's weights in this directory: index, shards and single file."""
    named = [directory / INDEX_NAME, directory / SINGLE_NAME]
    return [file for file in named if file.is_file()] + sorted(directory.glob(SHARD_PATTERN))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file in the order of their bytes, checked against the file's size. Raises CheckpointError."""
    if not is_there(file):
        raise wrong(file, f"expected a file with weights, but there is none. {_AGAIN}")
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            if _LFS_POINTER.startswith(start) and (start + stream.read(100)).startswith(_LFS_POINTER):
                raise wrong(file, "expected weights, got a Git LFS pointer to them. Run `git lfs pull`.")
            length = int.from_bytes(start, "little")
            if total >= 8 and length > MOST_HEADER_BYTES:
                raise wrong(file, f"expected a safetensors file, got something else. {_AGAIN}")
            if total < 8 + length:
                raise wrong(file, f"the file is truncated within its header ({total} bytes). {_AGAIN}")
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        said = f"expected a readable file, but {reason(error)}. Check its permissions."
        raise wrong(file, said) from None
    try:
        if not text.startswith(b"{"):
            raise ValueError("the header is no JSON object")
        header = parse_json(text)
        _check_metadata(header.pop("__metadata__", None))
        tensors = [_parse_entry(file, 8 + length, name, entry) for name, entry in header.items()]
    except ValueError as error:
        raise wrong(file, f"expected a safetensors header, but {error}. {_AGAIN}") from None
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    position = 8 + length
    for tensor in tensors:
        name, end = short(tensor.name), tensor.offset + tensor.size
        if tensor.offset != position:
            said = f"{name} should start at byte {position}, where the one before it ends, but starts at"
            raise wrong(file, f"{said} {tensor.offset}. {_AGAIN}", tensor.name)
        if end > total:
            said = f"the file is truncated: {name} ends at byte {end}, the file has {total}. {_AGAIN}"
            raise wrong(file, said, tensor.name)
        position = end
    if position != total:
        raise wrong(file, f"expected {position} bytes by its header, got {total}. {_AGAIN}")
    return {tensor.name: tensor for tensor in tensors}


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Reads the tensor into separate memory on the CPU. Raises CheckpointError when the file has become shorter."""
    assert stored.dtype is not None, f"{stored.name}: a dtype without torch equivalent is refused before reading"
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    buffer = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    done = 0
    try:
        with stored.file.open("rb", buffering=0) as stream:
            stream.seek(stored.offset)
            while done < stored.size:
                count = stream.readinto(buffer[done:])
                if not count:
                    said = f"{stored.name} should have {stored.size} bytes, got {done}. The file has been truncated"
                    said += " since it was opened: read it again when nobody writes to it."
                    raise wrong(stored.file, said, stored.name)
                done += count
    except OSError as error:
        said = f"{stored.name} could not be read ({reason(error)}). Check the disk, then try again."
        raise wrong(stored.file, said, stored.name) from None
    return tensor


def _check_metadata(metadata: Any) -> None:
    """The format allows texts only, and the library that vLLM reads with refuses anything else."""
    texts = [] if metadata is None else [*metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("its __metadata__ is not an object of texts")


def _parse_entry(file: Path, data_start: int, name: str, entry: Any) -> StoredTensor:
    """One tensor's line of the header. Raises ValueError, in words."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{short(name)} has no dtype, shape and data_offsets")
    dtype_name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]
    if not (sizes and len(shape) <= _MOST_AXES and isinstance(dtype_name, str)):
        raise ValueError(
            f"the dtype {quoted(dtype_name)}, shape {quoted(shape)} and data_offsets {quoted(offsets)} of "
            f"{short(name)} make no sense"
        )
    size, dtype = offsets[1] - offsets[0], _DTYPES.get(dtype_name)
    if dtype is not None and math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{short(name)} of shape {shape} and dtype {dtype_name} cannot have {size} bytes")
    return StoredTensor(name, file, dtype_name, dtype, tuple(shape), data_start + offsets[0], size)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _read_index(file: Path) -> dict[str, str]:
    """The index's `weight_map`: the shard's file name for each tensor."""
    content = read_json(file)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise wrong(file, "expected a `weight_map` of tensor names to files, got none. Download it again.")
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            said = f"{short(name)} should lie in a safetensors file of this directory, got {quoted(shard)}. Only"
            said += " safetensors beside the index are read: convert the checkpoint, or correct the index."
            raise wrong(file, said, name)
    return weight_map


def _is_file_name(shard: Any) -> bool:
    if not isinstance(shard, str) or not shard.endswith(".safetensors") or not shard.isprintable():
        return False
    return Path(shard).name == shard and len(shard.encode()) <= _MOST_NAME


def _read_shards(directory: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    """All shards of an index, which must agree with it in both directions."""
    index = directory / INDEX_NAME
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not is_there(directory / shard)]
    if absent:
        are = "is" if len(absent) == 1 else "are"
        said = f"expected {len(shards)} shards, but {listed(absent)} {are} not there. Download what is missing."
        raise wrong(index, said)
    stray = sorted(file.name for file in weight_files(directory) if file.name not in (*shards, INDEX_NAME))
    if stray:
        said = f"expected only the shards that it names, got {listed(stray)} too, left from another checkpoint."
        raise wrong(index, f"{said} Delete what does not belong here.")
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_header(directory / shard).items():
            if name not in weight_map or name in found:
                other = f"in {found[name].file.name} too" if name in found else "not listed"
                raise _disagree(index, name, weight_map.get(name, "no shard"), f"in {shard}, {other}")
            found[name] = tensor
    for name, shard in weight_map.items():
        where = found[name].file.name if name in found else "no shard"
        if where != shard:
            raise _disagree(index, name, shard, f"in {where}")
    return found


def _disagree(index: Path, name: str, shard: str, got: str) -> CheckpointError:
    said = f"expected {short(name)} in {shard}, got it {got}. Index and shards are not of one checkpoint: download them"
    return wrong(index, f"{said} again.", name)


def _what_else(directory: Path) -> str:
    """Describes the other files of a directory without weights, with the remedy."""
    loose = sorted(file.name for file in directory.glob("*.safetensors"))
    if loose:
        return f"{listed(loose)} without an index. The download is incomplete: get {INDEX_NAME} too."
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        return (
            f"{listed(pickles)}, a pickle. Pickles can run code and are never loaded: convert the checkpoint to "
            "safetensors where you trust it, or download the safetensors files."
        )
    return "neither. Give the directory that holds the weights, or download them."
