"""Tiny gpt-oss checkpoints in the official layout, with the real vocabulary: random of any shape, and a trained one.

A checkpoint exists in two forms that are the same function: the MXFP4 layout, and the BF16 layout that is its exact
expansion. The random weights are scaled so that what serving code gets wrong shows in the logits: sinks take a real
share of the attention, biases are as large as what they are added to, and some pre-activations lie beyond the clamp.

The trained one (docs/tiny-checkpoint.md) is stored compactly: the rows of embedding and head that are in use, their
token ids, experts in MXFP4, the rest in bfloat16. All other rows are zero, so their logits are exactly 0, and training
has pushed those in use above that.
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
from npu_gptoss.model.checkpoint import expand_stream, write_checkpoint
from npu_gptoss.model.config import FULL, MXFP4, SLIDING, GptOssConfig, YarnScaling
from npu_gptoss.moe.mxfp4 import compress
from npu_gptoss.tiny.tokenizer_files import PAD_ID, RETURN_ID, write_tokenizer_files

VOCABULARY_ROWS = 201_088  # as published: 200 019 tokens and padding to a multiple of 128 and more
TRAINED_FILE = Path(__file__).parents[1] / "assets" / "tiny_trained.safetensors"
MARKER = "tiny.json"  # in every checkpoint that is written here: how it was asked for, and its files' sizes
_FORMAT = 1  # of what is written; raised when the same options give other files

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
        """In the BF16 layout, float32: the same function."""
        return {name: tensor.float() for name, tensor in expand_stream(self.tensors.items(), torch.float32)}


def tiny_config(
    *,
    layers: int = SHAPE["layers"],
    hidden: int = SHAPE["hidden"],
    intermediate: int = SHAPE["intermediate"],
    experts: int = SHAPE["experts"],
    heads: int = SHAPE["heads"],
    kv_heads: int = SHAPE["kv_heads"],
    dtype: str = "bfloat16",
    mxfp4: bool = False,
) -> GptOssConfig:
    """The published numbers (vocabulary, YaRN, window, limit, head size) in a small shape. Raises ConfigError."""
    for name, value in (("--hidden", hidden), ("--intermediate", intermediate)):
        if value % 32:
            raise TinyError(f"{name} must be a multiple of 32 (values that share an MXFP4 scale), got {value}")
    return GptOssConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=min(4, experts),
        vocab_size=VOCABULARY_ROWS,
        sliding_window=128,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(layers)),
        rope_theta=150_000.0,
        rope_scaling=YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False),
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        eos_token_id=RETURN_ID,
        pad_token_id=PAD_ID,
        quantization=MXFP4 if mxfp4 else None,
        dtype=dtype,
    )


def random_tensors(config: GptOssConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in the MXFP4 layout, the others in bfloat16; the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul_(std).add_(mean)

    def plain() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.embed_tokens.weight", normal(config.vocab_size, hidden, std=1.0)
        yield "lm_head.weight", normal(config.vocab_size, hidden, std=2.0 * hidden**-0.5)
        yield "model.norm.weight", normal(hidden, std=0.1, mean=1.0)
        for layer in range(config.num_hidden_layers):
            base = f"model.layers.{layer}."
            attention, mlp = base + "self_attn.", base + "mlp."
            yield base + "input_layernorm.weight", normal(hidden, std=0.1, mean=1.0)
            yield base + "post_attention_layernorm.weight", normal(hidden, std=0.1, mean=1.0)
            for name, rows, columns in (
                ("q", query, hidden),
                ("k", kv, hidden),
                ("v", kv, hidden),
                ("o", hidden, query),
            ):
                yield f"{attention}{name}_proj.weight", normal(rows, columns, std=columns**-0.5)
                yield f"{attention}{name}_proj.bias", normal(rows, std=0.5)
            yield attention + "sinks", normal(config.num_attention_heads, std=1.5, mean=3.0)
            yield mlp + "router.weight", normal(experts, hidden, std=hidden**-0.5)
            yield mlp + "router.bias", normal(experts, std=0.5)
            # pre-activations of about 3, so that the clamp at 7 cuts a few per cent
            yield mlp + "experts.gate_up_proj", normal(experts, 2 * inner, hidden, std=3.0 * hidden**-0.5)
            yield mlp + "experts.gate_up_proj_bias", normal(experts, 2 * inner, std=1.0)
            yield mlp + "experts.down_proj", normal(experts, hidden, inner, std=0.2 * inner**-0.5)
            yield mlp + "experts.down_proj_bias", normal(experts, hidden, std=0.5)

    for name, tensor in plain():
        if name.endswith(_EXPERTS):
            yield from zip((f"{name}_blocks", f"{name}_scales"), compress(tensor), strict=True)
        else:
            yield name, tensor.to(torch.bfloat16)


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
            "train it again as docs/tiny-checkpoint.md says."
        ) from error
    return TrainedState(config, token_ids, tensors)


def save_trained(
    path: Path, config: GptOssConfig, token_ids: Sequence[int], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Writes parameters (BF16 layout, rows in use) compactly; what is not representable is rounded."""
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
        raise TinyError("an MXFP4 checkpoint holds its other tensors in bfloat16, as published: leave --dtype away")
    if trained:
        state = load_trained()
        config, tensors = state.config, trained_tensors(state)
    else:
        config = config or tiny_config()
        tensors = random_tensors(config, seed)
    config = replace(config, quantization=MXFP4 if mxfp4 else None, dtype=dtype)
    wanted = {"format": _FORMAT, "trained": trained, "seed": None if trained else seed, "config": config.to_dict()}
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise TinyError(f"{directory} is a file: name a directory that does not exist yet")
    if directory.is_dir() and any(directory.iterdir()):
        present = _read_marker(directory)
        if present is not None and _is_complete(directory, present, wanted):
            return False
        if present is None:
            raise TinyError(
                f"{directory} is not empty and holds no tiny checkpoint (no {MARKER}); name a directory that is new or "
                "empty"
            )
        if not force:
            raise TinyError(f"{directory} holds a tiny checkpoint with other options; add --force to replace it")
    try:
        _write_whole(directory, config, tensors, dtype, wanted)
    except (OSError, SafetensorError) as error:  # the library has a class of its own for a full disk
        reason = getattr(error, "strerror", None) or short(str(error))
        raise TinyError(
            f"{directory} cannot be written: {reason}. Nothing was left there. Make room (a tiny checkpoint needs "
            "about 150 MB), or name another directory."
        ) from error
    return True


def _write_whole(directory: Path, config: GptOssConfig, tensors: Any, dtype: str, wanted: dict[str, Any]) -> None:
    target = directory.absolute()
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
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            os.replace(target, old / target.name)  # noqa: PTH105  # of directories
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
