"""gpt-oss checkpoints as a stream of tensors: read, MXFP4 expanded, written.

Every tensor is accounted for before the first is read (`layout.py` says which there are, `safetensors_reader.py` where
they lie): missing, unexpected, repeated, of another shape or dtype than config.json says, in a truncated file, or in a
layout that contradicts config.json. Then one tensor after the other is read and expanded, so that loading needs little
more memory than its result.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from npu_gptoss.files import CheckpointError, wrong
from npu_gptoss.kernels.signature import dtype_name
from npu_gptoss.model.config import CONFIG_NAME, GptOssConfig
from npu_gptoss.model.foreign import refuse_foreign
from npu_gptoss.model.layout import (
    FLOATS,
    PACKED,
    accounted,
    check_layout,
    check_names,
    check_tensor,
    common_float,
    expected_tensors,
)
from npu_gptoss.model.safetensors_reader import (
    INDEX_NAME,
    SINGLE_NAME,
    StoredTensor,
    find_tensors,
    read_tensor,
    weight_files,
)
from npu_gptoss.model.values import checked_values
from npu_gptoss.moe.mxfp4 import Mxfp4Error, expand_transposed
from npu_gptoss.progress import counted

MAX_SHARD_BYTES = 5_000_000_000  # the hub's habit


def check_checkpoint(directory: str | os.PathLike[str], config: GptOssConfig) -> dict[str, StoredTensor]:
    """Accounts for every tensor of a directory from the files' headers; reads no tensor.

    Returns where each lies, in the order of `expected_tensors`. Raises CheckpointError.
    """
    directory = Path(directory)
    found, expected = find_tensors(directory), expected_tensors(config)
    if found.keys() != expected.keys():
        refuse_foreign(directory, found)
    check_layout(found, config, directory)
    check_names(found, expected, directory)
    for name, spec in expected.items():
        stored = found[name]
        check_tensor(name, stored.shape, stored.dtype or stored.dtype_name, spec, stored.file)
    return {name: found[name] for name in expected}


def iterate_tensors(
    directory: str | os.PathLike[str], config: GptOssConfig, *, dtype: torch.dtype, progress: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checks the whole checkpoint at once, then returns the stream of its tensors in their layout, floats in `dtype`.

    Args:
        directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`.
        config: the content of config.json.
        dtype: bfloat16 or float32.
        progress: a bar on stderr where that is a terminal.

    Yields name and tensor in the order of `expected_tensors`, on the CPU and owned by the caller. Besides what the
    caller keeps, memory holds one stored tensor. Raises CheckpointError.
    """
    _check_target(dtype)
    return _read_all(check_checkpoint(directory, config), dtype, progress, directory)


def expand_stream(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, kept: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Merges the `…_blocks` and `…_scales` of each expert matrix into one tensor of the BF16 layout, in `dtype`.

    The halves may come in any order and far apart (over shards); each waits for the other. Everything else passes
    through untouched, and so do the halves that `kept` names. A half that stays alone is dropped: `layout.accounted`
    sees to it that there is none. Raises CheckpointError for halves that do not fit.
    """
    _check_target(dtype)
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        match = PACKED.fullmatch(name)
        if match is None or name in kept:
            yield name, tensor
            del tensor  # or it would stay in memory while the next one is read
            continue
        matrix = match["name"]
        waiting.setdefault(matrix, {})[match["half"]] = tensor
        del tensor
        if len(waiting[matrix]) == 2:
            yield matrix, _expand_pair(matrix, waiting.pop(matrix), dtype)


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: GptOssConfig,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights and config.json in the official layout: all of it, or nothing.

    Args:
        directory: made if needed. It may hold other files (a tokenizer), but no weights.
        config: decides the layout (`quantization`) and all shapes; `torch_dtype` becomes the dtype of the tensors.
        tensors: all of `expected_tensors(config)`, from a mapping or one by one; at most a shard is held in memory.
        max_shard_bytes: above it, shards of at most this size (or of one tensor) and an index are written.

    Files are written under other names and renamed at the end, config.json last. Raises CheckpointError for tensors
    that do not fit the config.
    """
    directory = Path(directory)
    expected = expected_tensors(config)
    if old := weight_files(directory):
        said = f"expected a directory without weights, got {old[0].name}. Choose another, or delete them."
        raise wrong(directory, said, str(directory))
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=directory) as scratch:
        items = tensors.items() if isinstance(tensors, Mapping) else tensors
        items = accounted(counted(items, len(expected), "writing weights", "tensor"), config, "tensors to write")
        shards, dtypes = _write_shards(Path(scratch), items, max_shard_bytes)
        dtype = dtype_name(common_float(dtypes, directory))
        if config.dtype not in (None, dtype):
            said = f"config.dtype is {config.dtype}, got tensors in {dtype}. Make them agree."
            raise wrong(directory, said, "dtype")
        files = dict.fromkeys(shards, SINGLE_NAME)
        if len(shards) > 1:
            files = {f: f"model-{i:05}-of-{len(shards):05}.safetensors" for i, f in enumerate(shards, 1)}
            size = sum(size for held in shards.values() for size in held.values())
            weight_map = {name: files[file] for file, held in shards.items() for name in held}
            index = Path(scratch) / INDEX_NAME
            _write_json(index, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
            files[index] = INDEX_NAME
        settings = Path(scratch) / CONFIG_NAME
        _write_json(settings, replace(config, dtype=dtype).to_dict())
        files[settings] = CONFIG_NAME
        for file in shards:  # safetensors makes files that nobody else can read: a server may be another user
            file.chmod(settings.stat().st_mode)
        for file, name in files.items():
            file.replace(directory / name)


def _read_all(
    stored: dict[str, StoredTensor], dtype: torch.dtype, progress: bool, where: object
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden = None if progress else True  # None: tqdm asks if stderr is a terminal
    total = sum(tensor.size for tensor in stored.values())
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=hidden) as bar:

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in stored.items():
                yield name, read_tensor(tensor)
                bar.update(tensor.size)

        for name, tensor in checked_values(read(), dtype, where):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
            del tensor  # or it would stay in memory while the next one is read


def _expand_pair(name: str, halves: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    try:
        return expand_transposed(halves["blocks"], halves["scales"], dtype)
    except Mxfp4Error as error:
        raise CheckpointError(f"{name}: {error}", field=name) from None


def _check_target(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        said = f"weights can be loaded as bfloat16 or float32, got {dtype_name(dtype)}. gpt-oss overflows float16: use"
        raise CheckpointError(f"{said} bfloat16, or float32 on a CPU.", field="dtype")


def _write_shards(
    scratch: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> tuple[dict[Path, dict[str, int]], dict[str, torch.dtype]]:
    """Files under temporary names, each with its tensors' sizes; and the dtype of every tensor."""
    shards: dict[Path, dict[str, int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    pending: dict[str, torch.Tensor] = {}
    sizes: dict[str, int] = {}

    def flush() -> None:
        file = scratch / f"{len(shards)}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        shards[file] = dict(sizes)
        pending.clear()
        sizes.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and sum(sizes.values()) + size > max_shard_bytes:
            flush()
        # memory of its own: the format refuses tensors that share theirs
        pending[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        sizes[name], dtypes[name] = size, tensor.dtype
    if pending:
        flush()
    return shards, dtypes


def _write_json(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
