"""Random checkpoints in the official layout, small enough that a test writes one in a moment.

The experts' weights are values that MXFP4 represents exactly. So `mxfp4=True` and `mxfp4=False` with the same seed are
the same function in the two layouts, and every reader must compute the same bits from both.
"""

from __future__ import annotations

from pathlib import Path

import torch

from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.config import GptOssConfig, YarnScaling
from npu_gptoss.moe.mxfp4 import compress, expand


def random_config(
    *,
    vocab_size: int = 512,
    layers: int = 4,
    hidden: int = 96,
    intermediate: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    experts: int = 8,
    experts_per_token: int = 4,
    window: int = 128,
    max_positions: int = 4096 * 32,
    truncate: bool = False,
    eos_token_id: int | None = None,
    mxfp4: bool = False,
    dtype: str = "bfloat16",
) -> GptOssConfig:
    """gpt-oss's published numbers but for the sizes."""
    return GptOssConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_local_experts=experts,
        num_experts_per_tok=experts_per_token,
        vocab_size=vocab_size,
        sliding_window=window,
        layer_types=tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers)),
        rope_theta=150000.0,
        rope_scaling=YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=truncate),
        rms_norm_eps=1e-5,
        max_position_embeddings=max_positions,
        eos_token_id=eos_token_id,
        quantization="mxfp4" if mxfp4 else None,
        dtype=dtype,
    )


def random_tensors(config: GptOssConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every official tensor of the config, in its layout. Large enough that each one moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    experts, intermediate, head_dim = config.num_local_experts, config.intermediate_size, config.head_dim

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype)

    tensors = {
        "model.embed_tokens.weight": normal(config.vocab_size, hidden, std=1.0),
        "model.norm.weight": normal(hidden, std=0.1, mean=1.0),
        "lm_head.weight": normal(config.vocab_size, hidden, std=2 * hidden**-0.5),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            tensors[prefix + name] = normal(hidden, std=0.1, mean=1.0)
        tensors[prefix + "self_attn.sinks"] = normal(heads, std=1.0, mean=2.0)
        shapes = {
            "q": (heads * head_dim, hidden),
            "k": (kv_heads * head_dim, hidden),
            "v": (kv_heads * head_dim, hidden),
        }
        for name, (rows, columns) in {**shapes, "o": (hidden, heads * head_dim)}.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, columns, std=columns**-0.5)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = normal(rows, std=0.1)
        tensors[prefix + "mlp.router.weight"] = normal(experts, hidden, std=hidden**-0.5)
        tensors[prefix + "mlp.router.bias"] = normal(experts, std=0.1)
        # gate and up of about 3, so that the clamp at 7 cuts a few per cent of them
        for name, rows, columns, size in (
            ("gate_up", 2 * intermediate, hidden, 3.0),
            ("down", hidden, intermediate, 0.3),
        ):
            stem = f"{prefix}mlp.experts.{name}_proj"
            blocks, scales = compress(normal(experts, rows, columns, std=size * columns**-0.5).float())
            if config.quantization:
                tensors[stem + "_blocks"], tensors[stem + "_scales"] = blocks, scales
            else:
                tensors[stem] = expand(blocks, scales, dtype).transpose(1, 2).contiguous()
            tensors[stem + "_bias"] = normal(experts, rows, std=0.1)
    return tensors


def write_random_checkpoint(directory: Path, *, seed: int = 0, **sizes: object) -> GptOssConfig:
    """Writes config.json and the weights, no tokenizer; `sizes` are the arguments of `random_config`."""
    config = random_config(**sizes)
    write_checkpoint(directory, config, random_tensors(config, seed))
    return config
