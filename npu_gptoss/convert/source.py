"""Reads a checkpoint in any layout that `places` and the scales of FP8 describe, one official tensor at a time.

Everything is accounted for from headers before a tensor is read: each foreign tensor has one place, and the pieces of
each official tensor fill it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.convert.places import WHOLE, Place, place, unwrapped
from npu_gptoss.errors import InputError, short
from npu_gptoss.files import CheckpointError, read_json
from npu_gptoss.model.config import CONFIG_NAME, ConfigError, GptOssConfig, config_file
from npu_gptoss.model.config_fields import ARCHITECTURE, FULL, MODEL_TYPE, MXFP4, SLIDING
from npu_gptoss.model.foreign import recognise, refuse_foreign
from npu_gptoss.model.generation import HARMONY_STOP_TOKENS
from npu_gptoss.model.layout import BYTES, PACKED, TensorSpec, check_names, expected_tensors
from npu_gptoss.model.safetensors_reader import (
    INDEX_NAME,
    StoredTensor,
    find_tensors,
    read_header,
    read_tensor,
    tensor_files,
)

KEPT_SCALES = "mxfp4_scales"  # folder in a BF16 checkpoint: the scales that its experts had in MXFP4
LORA = re.compile(r"\.lora_|^lora_")
_SCALE = re.compile(r"(.*(?:weight|_proj))_scale(?:_inv)?")  # of the tensor before it, in float8
# of activations and caches, which BF16 has no use for, and of what trains beside the model
_UNUSED = re.compile(r".*\.(?:input|output|[qkv])_scale(?:_ub)?|.*\.original_module\..*|v_head\..*")
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF_OR_DOUBLE = (torch.float16, torch.float64)
_FLOATS = (torch.bfloat16, torch.float32, *_HALF_OR_DOUBLE, *_FLOAT8)
RETURN, _, END_OF_TEXT = HARMONY_STOP_TOKENS
_BLOCK = [128, 128]  # of DeepSeek's FP8, whose files need not say it


@dataclass(frozen=True)
class Piece:
    """A stored tensor, or some of its rows, and the view of the official tensor that it fills."""

    stored: StoredTensor
    place: Place
    scale: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.place.rows
        return self.stored.shape if rows is None else (rows.stop - rows.start, *self.stored.shape[1:])


@dataclass(frozen=True)
class Source:
    """A checkpoint as it lies in files.

    config: in the layout that the files have; specs: its tensors. pieces: by official name. lora: peft's tensors among
    the files', by name. kept: the scales of KEPT_SCALES. block: of float8. notes: what differs from config.json.
    """

    directory: Path
    config: GptOssConfig
    specs: dict[str, TensorSpec]
    pieces: dict[str, list[Piece]]
    lora: dict[str, StoredTensor]
    kept: dict[str, StoredTensor]
    block: list[int]
    notes: list[str] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        """Folders with the files beside the weights, the nearest first."""
        return [self.directory, self.directory.parent][: 1 + (self.directory.name == "original")]

    @property
    def files(self) -> list[Path]:
        stored = [*(piece.stored for each in self.pieces.values() for piece in each), *self.kept.values()]
        return sorted({one.file for one in stored})

    def read(self, name: str) -> torch.Tensor:
        """An official tensor in uint8, bfloat16 (also of float8) or float32 (of float16, float64, and of mixtures)."""
        pieces = self.pieces[name]
        if len(pieces) == 1 and pieces[0].place.view is WHOLE:
            return self._values(pieces[0])
        exact = all(piece.stored.dtype in (torch.bfloat16, *_FLOAT8) for piece in pieces)
        out = torch.empty(self.specs[name].shape, dtype=torch.bfloat16 if exact else torch.float32)
        for piece in pieces:
            piece.place.view(out).copy_(self._values(piece))
        return out

    def _values(self, piece: Piece) -> torch.Tensor:
        tensor = read_tensor(piece.stored)
        if piece.scale is not None:
            tensor = dequantised(tensor, read_tensor(piece.scale), self.block, piece.stored.name)
        elif tensor.dtype in _HALF_OR_DOUBLE:
            tensor = tensor.float()
        return tensor if piece.place.rows is None else tensor[piece.place.rows]


def dequantised(tensor: torch.Tensor, scale: torch.Tensor, block: list[int], name: str) -> torch.Tensor:
    """float8 times its scales, in bfloat16: one scale, one a row, or one a block of the last two axes."""
    scale = scale.float()
    if scale.numel() == 1:
        return (tensor.float() * scale.reshape(())).to(torch.bfloat16)
    scale = scale.view(*scale.shape, *[1] * (tensor.dim() - scale.dim()))
    for axis, size in enumerate(tensor.shape):
        count, step = scale.shape[axis], 1 if axis < tensor.dim() - 2 else block[axis - tensor.dim()]
        if count not in (1, size):
            if count != -(-size // step):
                raise CheckpointError(
                    f"{name}: {size} values with {step} under a scale should have {-(-size // step)} scales, got "
                    f"{count}. Check weight_block_size of config.json.",
                    field=name,
                )
            scale = scale.repeat_interleave(step, dim=axis).narrow(axis, 0, size)
    return (tensor.float() * scale).to(torch.bfloat16)


def open_source(directory: Path) -> Source:
    """Reads headers and config.json. Raises InputError, which names the tool whose files cannot be converted."""
    config_file(directory)
    values: Mapping[str, Any] = {}
    found: dict[str, StoredTensor] = {}
    try:
        found, values = _stored(directory), _config_values(directory)
        _refuse_unreadable(directory, found, values, files=False)
        return _open(directory, found, values)
    except InputError:
        _refuse_unreadable(directory, found, values)
        raise


def _refuse_unreadable(directory: Path, names: Iterable[str], values: Mapping[str, Any], *, files: bool = True) -> None:
    """Names the tool of a form that is not read here. files: as of `refuse_foreign`."""
    form = recognise(directory if files else None, names, values)
    if form is not None and not form.convertible:
        refuse_foreign(directory, names, values, files=files)


def _stored(directory: Path) -> dict[str, StoredTensor]:
    """All tensors; the files that an index names, else all but adapters. Names decide whether they are complete."""
    if (directory / INDEX_NAME).is_file():
        return find_tensors(directory)
    found: dict[str, StoredTensor] = {}
    for file in tensor_files(directory):
        if not file.name.startswith("adapter_"):
            for name, stored in read_header(file).items():
                if name in found:
                    raise CheckpointError(
                        f"{name}: expected it in one file, got it in {found[name].file.name} and {file.name}. Delete "
                        "what does not belong here.",
                        field=name,
                    )
                found[name] = stored
    return found or find_tensors(directory)  # which says what is missing


def _config_values(directory: Path) -> dict[str, Any]:
    values = read_json(directory / CONFIG_NAME, ConfigError)
    if isinstance(values, dict) and "rope_scaling_factor" in values and (directory.parent / CONFIG_NAME).is_file():
        above = read_json(directory.parent / CONFIG_NAME, ConfigError)  # original/ lies in the checkpoint's folder
        return above if isinstance(above, dict) and above.get("model_type") == "gpt_oss" else values
    return values


def _open(directory: Path, found: dict[str, StoredTensor], values: Mapping[str, Any]) -> Source:
    tensors = {
        name: replace(stored, dtype=torch.uint8) if stored.dtype_name == "F8_E8M0" else stored
        for name, stored in found.items()
        if not LORA.search(name) and not _UNUSED.fullmatch(name)
    }
    of_scales = {name: m[1] for name in tensors if (m := _SCALE.fullmatch(name)) and m[1] in tensors}
    scales = {of: tensors.pop(name) for name, of in of_scales.items()}
    official = {unwrapped(name) for name in tensors}
    packed = any(PACKED.fullmatch(name) or re.fullmatch(r"block\..*\.blocks", name) for name in official)
    routers = [
        s.shape[0] for n, s in tensors.items() if re.search(r"\.router\.(linear\.)?weight$|\.mlp\.gate\.weight$", n)
    ]
    config, notes = _config(values, routers[0] if routers else None, packed)
    pieces: dict[str, list[Piece]] = {}
    for name, stored in tensors.items():
        for where in place(name, config):
            pieces.setdefault(where.name, []).append(Piece(stored, where, scales.get(name)))
    expected = expected_tensors(config)
    check_names(pieces, expected, directory)
    for name, spec in expected.items():
        _check(name, spec, pieces[name])
    section = values.get("quantization_config") or {}
    kept_files = sorted((directory / KEPT_SCALES).glob("*.safetensors"))
    return Source(
        directory,
        config,
        expected,
        pieces,
        {name: stored for name, stored in found.items() if LORA.search(name)},
        {name: stored for file in kept_files for name, stored in read_header(file).items()},
        section.get("weight_block_size") or _BLOCK,
        notes,
    )


def _config(values: Mapping[str, Any], experts: int | None, packed: bool) -> tuple[GptOssConfig, list[str]]:
    """The numbers of config.json, and notes on the corrected ones. experts: rows of the router, which count."""
    notes = []
    values = _published(values) if "rope_scaling_factor" in values else dict(values)
    for name in ("quantization_config", "compression_config", "torch_dtype", "dtype"):
        values.pop(name, None)
    if "num_experts_per_tok" in values:  # which transformers reads
        values.pop("experts_per_token", None)
    if experts is not None and values.get("num_local_experts", values.get("num_experts")) != experts:
        values.pop("num_experts", None)
        values["num_local_experts"] = experts
        top_k = values.pop("experts_per_token", values.get("num_experts_per_tok"))
        values["num_experts_per_tok"] = top_k = min(experts, top_k) if isinstance(top_k, int) else top_k
        notes.append(f"config.json: {experts} experts, as the routers have; {short(top_k)} a token")
    config = GptOssConfig.from_dict({**values, "architectures": [ARCHITECTURE]})
    return replace(config, quantization=MXFP4 if packed else None, dtype="bfloat16"), notes


def _published(values: Mapping[str, Any]) -> dict[str, Any]:
    """original/config.json, whose names are those of gpt_oss/torch/model.py, in the names of the published one."""
    rest = dict(values)
    yarn = {"rope_type": "yarn", "truncate": False, "factor": rest.pop("rope_scaling_factor")}
    yarn |= {"beta_slow": rest.pop("rope_ntk_alpha", 1.0), "beta_fast": rest.pop("rope_ntk_beta", 32.0)}
    yarn["original_max_position_embeddings"] = length = rest.get("initial_context_length", 4096)
    layers, vocabulary = (rest.get(name, 0) for name in ("num_hidden_layers", "vocab_size"))
    return rest | {
        "model_type": MODEL_TYPE,
        "rope_scaling": yarn,
        "layer_types": [FULL if layer % 2 else SLIDING for layer in range(layers)],
        "max_position_embeddings": int(length * yarn["factor"]),
        "rms_norm_eps": 1e-5,
        **({"eos_token_id": RETURN, "pad_token_id": END_OF_TEXT} if vocabulary > RETURN else {}),
    }


def _check(name: str, spec: TensorSpec, pieces: list[Piece]) -> None:
    """The pieces are of a dtype that can be read, fit their places, and fill the tensor."""
    meta, filled = torch.zeros(spec.shape, dtype=torch.uint8, device="meta"), 0
    dtypes = BYTES if spec.dtypes == BYTES else _FLOATS
    for piece in pieces:
        stored, view = piece.stored, None
        if stored.dtype in _FLOAT8 and piece.scale is None:
            raise CheckpointError(
                f"{stored.file}: {stored.name} is float8 and should have scales, got none.", field=stored.name
            )
        with contextlib.suppress(IndexError):  # an expert that config.json does not have
            view = piece.place.view(meta)
        if view is None or tuple(view.shape) != piece.shape or stored.dtype not in dtypes:
            want = "another expert" if view is None else list(view.shape)
            raise CheckpointError(
                f"{stored.file}: {stored.name} should have shape {want} by config.json and a floating-point dtype, got "
                f"{list(piece.shape)} in {stored.dtype_name}. Check that config.json belongs to these weights.",
                field=stored.name,
            )
        filled += view.numel()
    if filled != meta.numel():
        raise CheckpointError(
            f"{name}: expected {meta.numel()} values, got {filled} in {len(pieces)} pieces. Download what is missing.",
            field=name,
        )
