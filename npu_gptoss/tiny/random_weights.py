"""Random gpt-oss weights of any shape, for checkpoints and for tests: where each part of the model shows in the logits.

Sinks take a real share of the attention, biases have the size of their sums, and some pre-activations lie
beyond the clamp. The experts' weights are values that MXFP4 represents, so the two layouts of one seed are the same
function. `bench/random_checkpoint.py` has weights of full size, made on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe.mxfp4 import compress, expand


@dataclass(frozen=True)
class Deviations:
    """Standard deviations that differ between uses. A matrix has its gain divided by the root of its inputs."""

    sinks: float = 1.5
    sinks_mean: float = 3.0
    bias: float = 0.5
    gate_up: float = 3.0  # gain; pre-activations of about 3, so that the clamp at 7 cuts a few per cent
    gate_up_bias: float = 1.0
    down: float = 0.2  # gain


def random_tensors(
    config: GptOssConfig, seed: int = 0, deviations: Deviations | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in the config's layout and dtype (bfloat16 where it names none), one by one."""
    scale = deviations or Deviations()
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(std).add_(mean).to(dtype)

    yield "model.embed_tokens.weight", normal(config.vocab_size, hidden, std=1.0)
    yield "model.norm.weight", normal(hidden, std=0.1, mean=1.0)
    yield "lm_head.weight", normal(config.vocab_size, hidden, std=2 * hidden**-0.5)
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield base + name, normal(hidden, std=0.1, mean=1.0)
        yield base + "self_attn.sinks", normal(config.num_attention_heads, std=scale.sinks, mean=scale.sinks_mean)
        for name, rows, columns in (("q", query, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, query)):
            yield f"{base}self_attn.{name}_proj.weight", normal(rows, columns, std=columns**-0.5)
            yield f"{base}self_attn.{name}_proj.bias", normal(rows, std=scale.bias)
        yield base + "mlp.router.weight", normal(experts, hidden, std=hidden**-0.5)
        yield base + "mlp.router.bias", normal(experts, std=scale.bias)
        for name, rows, columns, gain, bias in (
            ("gate_up_proj", 2 * inner, hidden, scale.gate_up, scale.gate_up_bias),
            ("down_proj", hidden, inner, scale.down, scale.bias),
        ):
            stem = f"{base}mlp.experts.{name}"
            blocks, scales = compress(normal(experts, rows, columns, std=gain * columns**-0.5).float())
            if config.quantization:
                yield stem + "_blocks", blocks
                yield stem + "_scales", scales
            else:
                yield stem, expand(blocks, scales, dtype).transpose(1, 2).contiguous()
            yield stem + "_bias", normal(experts, rows, std=bias)
