"""Random gpt-oss weights of full size in the official layout, made on the device: something to measure with.

Speed depends on shapes, on how many experts the tokens of a step are spread over and on values not being all alike;
it does not depend on what a model has learned. Normal weights of the published initializer's size give router logits
of unit scale, so that a step's tokens spread over the experts almost evenly, as an upper estimate of real traffic.
The checkpoint has no tokenizer: it is for token ids.

What they are no good for is comparing tokens: 24 layers of them amplify any rounding until two engines share a third of
their choices. `calm` gives the weights for that. Its layers add little to what passes through them, so that a rounding
stays one; and what they add depends on all that implementations get wrong: on sinks, on the window's last key, on
biases and on the clamp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from npu_gptoss.dense.rotary import apply_rotary
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.config import FULL, MXFP4, SLIDING, GptOssConfig, YarnScaling
from npu_gptoss.model.rope import yarn_inv_freq
from npu_gptoss.moe.mxfp4 import E2M1, GROUP

SHAPES = {"20b": (24, 32), "120b": (36, 128)}  # layers, experts
LAYOUTS = ("mxfp4", "bf16")
STD = 0.02  # `initializer_range` of the published config
# E8M0 bytes of 2 ** -7 and 2 ** -6: normal weights of STD reach 2.3 and 4.7 deviations under them, as trained ones do.
# Those of another deviation have others, so that their codes are spread alike.
SCALES = (120, 121)
EXPERTS_AT_ONCE = 8  # of one layer; bounds the memory that making them takes


@dataclass(frozen=True)
class Deviations:
    """Standard deviations of the drawn tensors; those that are not named here are the same in every checkpoint."""

    query_key: float = STD
    value: float = STD
    value_bias: float = STD
    output: float = STD
    router: float = STD
    router_bias: float = STD
    gate_up: float = STD
    gate_up_bias: float = STD
    down: float = STD
    sinks_mean: float = 0.0
    look_back: bool = False  # the biases of queries and keys are `look_back_biases`, not normal of STD


def calm(config: GptOssConfig) -> Deviations:
    """Weights with which two right implementations in bfloat16 agree and a wrong one does not, at any width.

    A projection of n inputs and deviation g / sqrt(n) multiplies the deviation of normed inputs by g. Chosen on the CPU
    at 512 channels, 24 layers and 32 experts, in fp32 against bf16 and against mistakes (docs/decisions.md):

    * output 0.32, down 2 ** -7: each layer adds about a tenth of the residual stream's deviation. What it does to an
      error is then added to the error, rather than put in its place; 48 roundings of the stream itself remain.
    * query and key 0.25, on biases that look back: where attention looks hardly depends on what rounding has changed.
    * router and its biases 4: the fourth expert has so little weight that the fifth in its place changes little.
    * gate and up 4, their biases 1: 5 and 10 % of them are clamped at 7, and the biases matter beside them.
    * sinks about the score of a key that is looked for: they take a part of every head's weight, all where none is.
    """
    hidden = config.hidden_size**-0.5
    return Deviations(
        query_key=0.25 * hidden,
        value=hidden,
        value_bias=0.1,
        output=0.32 * (config.num_attention_heads * config.head_dim) ** -0.5,
        router=4 * hidden,
        router_bias=4.0,
        gate_up=4 * hidden,
        gate_up_bias=1.0,
        down=2**-7 * config.intermediate_size**-0.5,
        sinks_mean=config.head_dim**0.5 * yarn_inv_freq(config)[1] ** 2,
        look_back=True,
    )


def look_back_biases(
    config: GptOssConfig, window: int | None, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of one layer's queries [heads * head_dim] and keys [kv_heads * head_dim] with which a head looks back.

    A head's query bias is its key bias turned back by some positions, and rotary embedding turns it on: the two meet
    where the key is that many positions earlier. Of a window layer, every other head looks for the oldest key that it
    may see, so that half of them miss it in a window of one less and find another in one of one more; all other heads
    look back by a drawn number of positions, below the width of the model's windows.
    """
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    keys = torch.randn((kv_heads, dim), generator=generator, device=device)
    back = torch.randint(0, config.sliding_window, (heads,), generator=generator, device=device)
    if window is not None:
        back[::2] = window - 1
    angles = -back[:, None] * yarn_inv_freq(config)[0].to(device)
    queries = apply_rotary(keys.repeat_interleave(heads // kv_heads, 0)[:, None], angles.cos(), angles.sin())
    return queries.flatten().bfloat16(), keys.flatten().bfloat16()


def full_config(size: str, *, mxfp4: bool = True) -> GptOssConfig:
    """The published numbers of 20b or 120b."""
    if size not in SHAPES:
        raise InputError(f"the published sizes are {', '.join(SHAPES)}, got {size!r}")
    layers, experts = SHAPES[size]
    return GptOssConfig(
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        vocab_size=201_088,
        sliding_window=128,
        layer_types=tuple(FULL if layer % 2 else SLIDING for layer in range(layers)),
        rope_theta=150_000.0,
        rope_scaling=YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False),
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        eos_token_id=200_002,
        pad_token_id=199_999,
        quantization=MXFP4 if mxfp4 else None,
        dtype="bfloat16",
    )


def model_name(config: GptOssConfig) -> str:
    """20b or 120b, or what tells another shape apart."""
    for size in SHAPES:
        other = full_config(size, mxfp4=config.quantization is not None)
        if replace(other, dtype=config.dtype, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id) == (
            replace(config, other_eos_token_ids=())
        ):
            return size
    return f"{config.num_hidden_layers}x{config.hidden_size}x{config.num_local_experts}e"


def scales_of(std: float) -> tuple[int, ...]:
    """SCALES moved by whole powers of two to where they are to `std` what SCALES are to STD."""
    return tuple(scale + round(math.log2(std / STD)) for scale in SCALES)


def random_mxfp4(
    shape: tuple[int, ...], std: float, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values rounded to E2M1 under a drawn scale a group: blocks [..., groups, 16], scales [..., groups]."""
    *rows, columns = shape
    groups = columns // GROUP
    scales = torch.randint(0, len(SCALES), (*rows, groups), generator=generator, device=device)
    scales = torch.tensor(scales_of(std), device=device, dtype=torch.uint8)[scales]
    values = torch.randn((*rows, groups, GROUP), generator=generator, device=device)
    values *= std * torch.exp2(127.0 - scales[..., None].float())
    steps = torch.tensor(E2M1, device=device)
    codes = torch.bucketize(values.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def random_tensors(
    config: GptOssConfig, seed: int, device: torch.device, deviations: Deviations | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the config's layout, one by one, in the order of the official names.

    deviations: None is the published initializer's.
    """
    deviations = deviations or Deviations()
    generator = torch.Generator(device=device).manual_seed(seed)
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def normal(*shape: int, std: float = STD, mean: float = 0.0) -> torch.Tensor:
        drawn = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return drawn.normal_(mean, std, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", normal(config.vocab_size, hidden, std=1.0)
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}."
        yield base + "input_layernorm.weight", ones(hidden)
        yield base + "post_attention_layernorm.weight", ones(hidden)
        made = {}  # biases that are not drawn one by one
        if deviations.look_back:
            made["q"], made["k"] = look_back_biases(config, config.window(layer), generator, device)
        for name, rows, columns, std, bias_std in (
            ("q", query, hidden, deviations.query_key, STD),
            ("k", kv, hidden, deviations.query_key, STD),
            ("v", kv, hidden, deviations.value, deviations.value_bias),
            ("o", hidden, query, deviations.output, STD),
        ):
            yield f"{base}self_attn.{name}_proj.weight", normal(rows, columns, std=std)
            bias = made[name] if name in made else normal(rows, std=bias_std)
            yield f"{base}self_attn.{name}_proj.bias", bias
        yield base + "self_attn.sinks", normal(config.num_attention_heads, std=1.0, mean=deviations.sinks_mean)
        yield base + "mlp.router.weight", normal(experts, hidden, std=deviations.router)
        yield base + "mlp.router.bias", normal(experts, std=deviations.router_bias)
        for name, rows, columns, std, bias_std in (
            ("gate_up_proj", 2 * inner, hidden, deviations.gate_up, deviations.gate_up_bias),
            ("down_proj", hidden, inner, deviations.down, STD),
        ):
            stem = f"{base}mlp.experts.{name}"
            if config.quantization is None:
                yield stem, normal(experts, columns, rows, std=std)
            else:
                parts = [
                    random_mxfp4((min(EXPERTS_AT_ONCE, experts - first), rows, columns), std, generator, device)
                    for first in range(0, experts, EXPERTS_AT_ONCE)
                ]
                blocks, scales = (torch.cat(halves) for halves in zip(*parts, strict=True))
                yield f"{stem}_blocks", blocks
                yield f"{stem}_scales", scales
            yield f"{stem}_bias", normal(experts, rows, std=bias_std)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", normal(config.vocab_size, hidden)


def write_random_checkpoint(
    directory: Path,
    config: GptOssConfig,
    *,
    seed: int,
    device: torch.device,
    deviations: Deviations | None = None,
) -> None:
    """Writes weights and config.json, whole or not at all; refuses a directory that holds weights already."""
    write_checkpoint(directory, config, random_tensors(config, seed, device, deviations))
