"""Tiny gpt-oss checkpoints in the official layout, with the real vocabulary: random of any shape, and a trained one.

A checkpoint exists in two forms that are the same function: the MXFP4 layout, and the BF16 layout that is its exact
expansion. `random_weights.py` draws the random ones.

The trained one (docs/tiny-checkpoint.md) is stored compactly: the rows of embedding and head in use, their
token ids, experts in MXFP4, the rest in bfloat16. All other rows are zero, so their logits are exactly 0, and training
has pushed the rows in use above that.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from npu_gptoss.errors import InputError, short
from npu_gptoss.files import is_directory
from npu_gptoss.model.checkpoint import expand_stream, write_checkpoint
from npu_gptoss.model.config import MXFP4, GptOssConfig, published_config
from npu_gptoss.moe.mxfp4 import GROUP, compress
from npu_gptoss.tiny.random_weights import random_tensors
from npu_gptoss.tiny.tokenizer_files import PAD_ID, RETURN_ID, write_tokenizer_files

TRAINED_FILE = Path(__file__).parents[1] / "assets" / "tiny_trained.safetensors"
MARKER = "tiny.json"  # in every checkpoint that is written here: how it was asked for, and its files' sizes
_FORMAT = {True: 1, False: 2}  # by `trained`; raised when the same options give other files

# the shape of a random checkpoint, and of the trained one; head size and window are the published ones
SHAPE = {"layers": 4, "hidden": 128, "intermediate": 128, "experts": 8, "heads": 8, "kv_heads": 2}

_EXPERTS = ("gate_up_proj", "down_proj")
_ROWS = ("model.embed_tokens.weight", "lm_head.weight")

Tensors = dict[str, torch.Tensor]


class TinyError(InputError):
    """A tiny checkpoint that cannot be made as asked."""


@dataclass(frozen=True)
class TrainedState:
    """The trained network on the tokens in use. Row i of embedding and head belongs to `token_ids[i]`, ascending."""

    config: GptOssConfig
    token_ids: list[int]
    tensors: Tensors  # official names; experts as blocks and scales, the rest bfloat16

    @property
    def parameters(self) -> Tensors:
        """Returns the parameters in the BF16 layout as float32: the same function."""
        return {name: tensor.float() for name, tensor in expand_stream(self.tensors.items(), torch.float32)}


def tiny_config(*, mxfp4: bool = False, dtype: str = "bfloat16", **sizes: int) -> GptOssConfig:
    """The published numbers in a small shape; sizes as in SHAPE. Raises TinyError, ConfigError."""
    sizes = SHAPE | sizes
    for name in ("hidden", "intermediate"):
        if sizes[name] % GROUP:
            raise TinyError(
                f"--{name} must be a multiple of {GROUP} (values that share an MXFP4 scale), got {sizes[name]}",
                field=f"--{name}",
            )
    return published_config(
        **sizes,
        experts_per_token=min(4, sizes["experts"]),
        eos_token_id=RETURN_ID,
        pad_token_id=PAD_ID,
        mxfp4=mxfp4,
        dtype=dtype,
    )


def load_trained(path: Path = TRAINED_FILE) -> TrainedState:
    """Reads the compact trained state. Raises TinyError."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        config = GptOssConfig.from_dict(json.loads(metadata["config"]))
        token_ids = tensors.pop("token_ids").tolist()
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise TinyError(
            f"{path} does not hold the trained state ({type(error).__name__}: {error}). Reinstall the package, or "
            "train it again as docs/tiny-checkpoint.md says.",
            field=path.name,
        ) from error
    return TrainedState(config, token_ids, tensors)


def save_trained(
    path: Path, config: GptOssConfig, token_ids: Sequence[int], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Writes parameters (BF16 layout, rows in use) compactly; values that MXFP4 or bfloat16 cannot hold are rounded."""
    tensors: Tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int32)}
    for name, tensor in parameters.items():
        tensor = tensor.detach().cpu()
        if name.endswith(_EXPERTS):
            blocks, scales = compress(tensor.float().transpose(1, 2).contiguous())
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        else:
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
    metadata = {"format": "pt", "config": json.dumps(replace(config, quantization=MXFP4).to_dict())}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)


def trained_tensors(state: TrainedState) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in the MXFP4 layout with the whole vocabulary; the rows that are not in use are zero."""
    rows = torch.tensor(state.token_ids)
    for name, tensor in state.tensors.items():
        if name in _ROWS:
            whole = tensor.new_zeros(state.config.vocab_size, tensor.shape[1])
            whole[rows] = tensor
            yield name, whole
        else:
            yield name, tensor


def write_tiny(
    directory: Path,
    *,
    config: GptOssConfig | None = None,
    seed: int = 0,
    trained: bool = False,
    mxfp4: bool = False,
    dtype: str = "bfloat16",
    force: bool = False,
) -> bool:
    """Writes a checkpoint that appears whole or not at all. Returns False when the same one is already there.

    `config` gives the shape of a random one (default: `tiny_config()`). Refuses a directory with anything else in it;
    `force` replaces a checkpoint that was written here, and never another directory. Raises TinyError, VocabularyError.
    """
    if mxfp4 and dtype != "bfloat16":
        raise TinyError(
            "an MXFP4 checkpoint holds its other tensors in bfloat16, as published: leave --dtype away", field="--dtype"
        )
    if trained:
        state = load_trained()
        config, tensors = state.config, trained_tensors(state)
    else:
        config = config or tiny_config()
        tensors = random_tensors(replace(config, quantization=MXFP4, dtype="bfloat16"), seed)
    config = replace(config, quantization=MXFP4 if mxfp4 else None, dtype=dtype)
    wanted = {"format": _FORMAT[trained], "trained": trained, "seed": None if trained else seed}
    wanted["config"] = config.to_dict()
    directory = Path(directory)
    if not is_directory(directory, TinyError) and directory.exists():
        raise TinyError(f"{directory} is a file: name a directory that does not exist yet", field=str(directory))
    if directory.is_dir() and any(directory.iterdir()):
        present = _read_marker(directory)
        if present is not None and _is_complete(directory, present, wanted):
            return False
        if present is None:
            raise TinyError(
                f"{directory} is not empty and holds no tiny checkpoint (no {MARKER}); name a directory that is new or "
                "empty",
                field=str(directory),
            )
        if not force:
            raise TinyError(
                f"{directory} holds a tiny checkpoint with other options; add --force to replace it", field="--force"
            )
    try:
        _write_whole(directory, config, tensors, dtype, wanted)
    except (OSError, SafetensorError) as error:  # the library has a class of its own for a full disk
        reason = getattr(error, "strerror", None) or short(str(error))
        raise TinyError(
            f"{directory} cannot be written: {reason}. Nothing was left there. Make room (a tiny checkpoint needs "
            "about 150 MB), or name another directory.",
            field=str(directory),
        ) from error
    return True


def _write_whole(directory: Path, config: GptOssConfig, tensors: Any, dtype: str, wanted: dict[str, Any]) -> None:
    target = Path(os.path.realpath(directory))  # behind links, which would be replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_tokenizer_files(temporary)
        if config.quantization is None:
            kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
            tensors = ((name, tensor.to(kind)) for name, tensor in expand_stream(tensors, kind))
        write_checkpoint(temporary, config, tensors)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / MARKER).write_text(json.dumps({**wanted, "files": sizes}, indent=1) + "\n")
        temporary.chmod(0o755)
        if target.exists():
            old = temporary.with_name(f"{temporary.name}.old")
            os.replace(target, old)  # noqa: PTH105  # of directories
            os.replace(temporary, target)  # noqa: PTH105
            shutil.rmtree(old)
        else:
            os.replace(temporary, target)  # noqa: PTH105
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _read_marker(directory: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((directory / MARKER).read_text())
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and isinstance(marker.get("files"), dict) else None


def _is_complete(directory: Path, present: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """The same options, and every file there in its size."""
    files = present["files"]
    same = {name: value for name, value in present.items() if name != "files"} == json.loads(json.dumps(wanted))
    return same and all(
        (directory / n).is_file() and (directory / n).stat().st_size == size for n, size in files.items()
    )
