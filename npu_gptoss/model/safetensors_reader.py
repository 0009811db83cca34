"""Finds and reads the safetensors files of a checkpoint directory, headers first.

Contract: the sharding of the Hugging Face hub (`model.safetensors`, or shards named by `model.safetensors.index.json`).

Everything that can be wrong with the files' structure is found from headers and file sizes, before a byte of any tensor
is read, and each finding names the file. Each tensor is read into separate memory, not mapped, so that the process
holds only the tensors it asked for, and a file that shrinks meanwhile is an error, not a crash. Pickles
(.bin, .pt, .pth) are never opened: loading one runs the code in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from npu_gptoss.errors import quoted, short
from npu_gptoss.files import CheckpointError, is_directory, is_there, mode_of, read_json, reason, refuse_pointer, wrong
from npu_gptoss.model.foreign import convert_command, refuse_foreign

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARD_PATTERN = "model-*-of-*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_UNFINISHED = (".aria2", ".st")  # notes of aria2 (hfd) and axel: the file has its size at once, with zeros for data
_MOST_NAME = 255  # bytes of a file's name, on every file system that a checkpoint lies on
_AGAIN = "The download is incomplete or damaged: download the file again."

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


def tensor_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a folder without hidden ones: macOS leaves `._` files beside others."""
    return sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith("."))


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
    stray = [file.name for file in tensor_files(directory) if file != single]
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
    """The tensors of one file in the order of their bytes. Raises CheckpointError.

    The library checks that they fill the file without gaps, each as long as its dtype and shape say.
    """
    if not is_there(file):
        raise wrong(file, f"expected a file with weights, but there is none. {_AGAIN}")
    for note in (file.with_name(file.name + ending) for ending in _UNFINISHED):
        if mode_of(note):
            raise wrong(
                file, f"the download has not ended, as {note.name} tells. Go on with the command that began it."
            )
    try:
        refuse_pointer(file)
        with file.open("rb") as stream, safe_open(file, "numpy"):  # for torch it would map the file as memory
            start = 8 + int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(start - 8))
    except OSError as error:
        said = f"expected a readable file, but {reason(error)}. Check its permissions."
        raise wrong(file, said) from None
    except SafetensorError as error:
        raise wrong(file, f"the file is truncated or damaged ({short(str(error), 300)}). {_AGAIN}") from None
    header.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = entry["data_offsets"]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        found[name] = StoredTensor(name, file, kind, _DTYPES.get(kind), shape, start + first, end - first)
    return found


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


def _read_index(file: Path) -> dict[str, str]:
    """The index's `weight_map`: the shard's file name for each tensor."""
    content = read_json(file)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise wrong(file, "expected a `weight_map` of tensor names to files, got none. Download it again.")
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            said = f"{short(name)} should lie in a safetensors file of this directory, got {quoted(shard)}. Only"
            said += " safetensors beside the index are read: move them there, and correct the index."
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
        said = f"expected {len(shards)} shards, but {listed(absent)} {are} not there. "
        stale = len(absent) == len(shards) and (directory / SINGLE_NAME).is_file()
        remedy = f"Delete this index, if {SINGLE_NAME} is the whole model" if stale else "Download what is missing"
        raise wrong(index, f"{said}{remedy}.")
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
    if loose := [file.name for file in tensor_files(directory)]:
        remedy = f"Get {INDEX_NAME} too, or, if nothing else is missing, run `{convert_command(directory)}`."
        return f"{listed(loose)} without an index. {remedy}"
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        return (
            f"{listed(pickles)}, a pickle. Pickles can run code and are never loaded: convert the checkpoint to "
            "safetensors where you trust it, or download the safetensors files."
        )
    return "neither. Give the directory that holds the weights, or download them."
