"""A random DFlash drafter for a gpt-oss checkpoint, in the format of z-lab/gpt-oss-20b-DFlash, which vLLM reads: Qwen3
layers over the target's hidden states, with the target's embedding and head, that draft a block of masks at once."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from npu_gptoss.model.config import GptOssConfig

LAYERS, STD, MASK = 2, 0.02, 7  # the id of the token that stands for a mask


def write_dflash(directory: Path, checkpoint: Path) -> None:
    """Writes config.json and model.safetensors for the target in `checkpoint`."""
    target = GptOssConfig.from_directory(checkpoint)
    copied = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: getattr(target, name) for name in (*copied, "vocab_size", "max_position_embeddings")}
    taps = [1, target.num_hidden_layers - 2]
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": LAYERS}
    config |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16", "block_size": 8}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": False}
    config |= {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": taps}}
    hidden, inner, dim = target.hidden_size, target.intermediate_size, target.head_dim
    query, key = target.num_attention_heads * dim, target.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, len(taps) * hidden), "hidden_norm": (hidden,)}
    shapes["norm"] = (hidden,)
    for layer in range(LAYERS):
        of = f"layers.{layer}."
        shapes |= {
            f"{of}self_attn.{name}_proj": (size, hidden) for name, size in {"q": query, "k": key, "v": key}.items()
        }
        shapes |= {f"{of}self_attn.o_proj": (hidden, query), f"{of}mlp.down_proj": (hidden, inner)}
        shapes |= {f"{of}self_attn.{name}_norm": (dim,) for name in "qk"}
        shapes |= {f"{of}mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{of}{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else STD * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file({n: t.bfloat16() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
