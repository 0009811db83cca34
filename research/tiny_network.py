"""A second, short gpt-oss for training and ablations: batched, differentiable, without a KV cache.

The tiny checkpoint tests the serving code, so the network that trains it shares none of that code. `Knobs` take one
part away (sinks, window, a bias, the clamp), for the ablations of docs/tiny-checkpoint.md. They are tensors, not code
paths, so that one recorded CUDA graph runs all of them. Parameters have the official names in the BF16 layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import yarn_inv_freq
from npu_gptoss.moe.activation import ALPHA, LIMIT
from npu_gptoss.moe.mxfp4 import E2M1

Parameters = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Knobs:
    """The factor or value of each part: floats, or tensors of one value each. The default is gpt-oss."""

    sink: float | torch.Tensor = 0.0  # added to every sink
    window: float | torch.Tensor = 128.0
    q: float | torch.Tensor = 1.0  # factors of the biases
    k: float | torch.Tensor = 1.0
    v: float | torch.Tensor = 1.0
    o: float | torch.Tensor = 1.0
    router: float | torch.Tensor = 1.0
    gate_up: float | torch.Tensor = 1.0
    down: float | torch.Tensor = 1.0
    limit: float | torch.Tensor = LIMIT
    alpha: float | torch.Tensor = ALPHA
    one: float | torch.Tensor = 1.0  # added to `up`

    def vector(self) -> torch.Tensor:
        return torch.tensor([getattr(self, field.name) for field in fields(self)], dtype=torch.float32)

    @classmethod
    def of(cls, vector: torch.Tensor) -> Knobs:
        return cls(*vector.unbind())


GPT_OSS = Knobs()
NEVER = 1e6  # larger than any position or pre-activation
ABLATIONS: dict[str, Knobs] = {
    "nothing taken away": GPT_OSS,
    "sinks dropped": replace(GPT_OSS, sink=-1e4),
    "window removed": replace(GPT_OSS, window=NEVER),
    "q bias dropped": replace(GPT_OSS, q=0.0),
    "k bias dropped": replace(GPT_OSS, k=0.0),
    "v bias dropped": replace(GPT_OSS, v=0.0),
    "o bias dropped": replace(GPT_OSS, o=0.0),
    "router bias dropped": replace(GPT_OSS, router=0.0),
    "gate/up bias dropped": replace(GPT_OSS, gate_up=0.0),
    "down bias dropped": replace(GPT_OSS, down=0.0),
    "activation not clamped": replace(GPT_OSS, limit=NEVER),
    "alpha 1 instead of 1.702": replace(GPT_OSS, alpha=1.0),
    "plain SwiGLU": replace(GPT_OSS, limit=NEVER, alpha=1.0, one=0.0),
}


def initial_parameters(config: GptOssConfig, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Draws a seeded start. Biases and sinks start large, and pre-activations reach the clamp: training builds on them.

    `rows` is the number of vocabulary rows in use.
    """
    g = torch.Generator().manual_seed(seed)
    hidden, inner, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * std + mean

    p = {
        "model.embed_tokens.weight": normal(rows, hidden, std=1.0),
        "lm_head.weight": normal(rows, hidden, std=0.5 * hidden**-0.5),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config.num_hidden_layers):
        a, m = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        p[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(hidden)
        p[f"model.layers.{layer}.post_attention_layernorm.weight"] = torch.ones(hidden)
        p[a + "q_proj.weight"] = normal(query, hidden, std=hidden**-0.5)
        p[a + "q_proj.bias"] = normal(query, std=0.5)
        p[a + "k_proj.weight"] = normal(kv, hidden, std=hidden**-0.5)
        p[a + "k_proj.bias"] = normal(kv, std=0.5)
        p[a + "v_proj.weight"] = normal(kv, hidden, std=hidden**-0.5)
        p[a + "v_proj.bias"] = normal(kv, std=0.5)
        p[a + "o_proj.weight"] = normal(hidden, query, std=0.7 * query**-0.5)
        p[a + "o_proj.bias"] = normal(hidden, std=0.3)
        p[a + "sinks"] = normal(config.num_attention_heads, std=1.0, mean=2.0)
        p[m + "router.weight"] = normal(experts, hidden, std=hidden**-0.5)
        p[m + "router.bias"] = normal(experts, std=0.5)
        p[m + "experts.gate_up_proj"] = normal(experts, hidden, 2 * inner, std=2.5 * hidden**-0.5)
        p[m + "experts.gate_up_proj_bias"] = normal(experts, 2 * inner, std=2.0)
        p[m + "experts.down_proj"] = normal(experts, inner, hidden, std=0.1 * inner**-0.5)
        p[m + "experts.down_proj_bias"] = normal(experts, hidden, std=0.3)
    return p


def round_experts(weight: torch.Tensor) -> torch.Tensor:
    """Rounds [experts, in, out] (BF16 layout) to MXFP4; the groups of 32 run along `in`.

    Equals `moe.mxfp4.compress` and `expand` (a test compares them) without their checks, which would make a GPU wait.
    """
    experts, inner, outer = weight.shape
    groups = weight.detach().float().view(experts, inner // 32, 32, outer)
    largest = groups.abs().amax(2, keepdim=True)
    scale = torch.exp2(torch.where(largest > 0, torch.floor(torch.log2(largest)) - 2, 0.0))
    x = groups / scale
    # steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6; torch.round takes ties to even as the format does
    step = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    return (torch.clamp(torch.round(x / step) * step, -E2M1[-1], E2M1[-1]) * scale).view_as(weight)


def straight_through(parameters: Parameters, share: float | torch.Tensor = 1.0) -> dict[str, torch.Tensor]:
    """Rounds the experts to MXFP4 in the forward pass (to a share); the gradient ignores the rounding."""
    return {
        name: w + share * (round_experts(w) - w).detach() if name.endswith(("gate_up_proj", "down_proj")) else w
        for name, w in parameters.items()
    }


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


@functools.lru_cache(maxsize=32)
def rotary_table(config: GptOssConfig, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, head_dim / 2]; kept, because a CUDA graph cannot copy from the host."""
    inv_freq, factor = yarn_inv_freq(config)
    angles = torch.arange(tokens, dtype=torch.float32)[:, None] * inv_freq
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] with cos and sin [tokens, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Softmax attention with one sink a head: [batch, heads, tokens, dim], sinks [heads], visible [tokens, tokens].

    The sink is an extra key with the value zero, visible to every query. Its score comes from an extra dimension, in
    which queries are 1 and other keys 0. Eight keys and dimensions are added, for alignment.
    """
    batch, heads, tokens, dim = q.shape
    scale = dim**-0.5
    q = torch.cat((q, q.new_ones(batch, heads, tokens, 1), q.new_zeros(batch, heads, tokens, 7)), -1)
    k = F.pad(k, (0, 8, 0, 8))  # eight keys more, of which the first is the sink
    at = F.pad((sinks / scale).to(k.dtype).view(1, heads, 1, 1), (dim, 7, tokens, 7))
    visible = F.pad(visible, (0, 1), value=True)
    visible = F.pad(visible, (0, 7), value=False)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(q, k + at, F.pad(v, (0, 8, 0, 8)), attn_mask=visible, scale=scale)
    return out[..., :dim]


def forward(
    p: Parameters, config: GptOssConfig, ids: torch.Tensor, knobs: Knobs = GPT_OSS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token rows [batch, tokens] -> hidden states [batch, tokens, hidden] after the last norm, and the balance loss.

    Short rows are padded at the end with any ids, since no token sees a later one. The row number after the last means
    an unused token: its embedding is zero and not trained.
    """
    batch, tokens = ids.shape
    device = ids.device
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    embedding = p["model.embed_tokens.weight"]
    x = F.embedding(ids, F.pad(embedding, (0, 0, 0, 1)))
    kind = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
    cos, sin = (t.to(kind) for t in rotary_table(config, tokens, device))
    distance = torch.arange(tokens, device=device)[:, None] - torch.arange(tokens, device=device)
    causal = distance >= 0
    near = causal & (distance < knobs.window)
    balance = x.new_zeros(())
    for layer in range(config.num_hidden_layers):
        a, m = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        y = rms_norm(x, p[f"model.layers.{layer}.input_layernorm.weight"], config.rms_norm_eps).to(kind)
        q, k, v = (
            F.linear(y, p[f"{a}{n}_proj.weight"], p[f"{a}{n}_proj.bias"] * getattr(knobs, n))
            .view(batch, tokens, -1, dim)
            .transpose(1, 2)
            for n in "qkv"
        )
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (rotate(k, cos, sin), v))
        visible = causal if config.window(layer) is None else near
        y = attention(rotate(q, cos, sin), k, v, p[a + "sinks"] + knobs.sink, visible)
        y = y.transpose(1, 2).reshape(batch, tokens, heads * dim)
        x = x + F.linear(y, p[a + "o_proj.weight"], p[a + "o_proj.bias"] * knobs.o)

        y = rms_norm(x, p[f"model.layers.{layer}.post_attention_layernorm.weight"], config.rms_norm_eps)
        y = y.view(-1, y.shape[-1])
        with torch.autocast(device.type, enabled=False):  # routing in fp32, so that rounding does not choose experts
            router = F.linear(y, p[m + "router.weight"], p[m + "router.bias"] * knobs.router)
        top, chosen = router.topk(config.num_experts_per_tok, -1)
        share = torch.zeros_like(router).scatter(1, chosen, top.softmax(-1))
        balance = balance + (router.softmax(-1).mean(0) * (share > 0).float().mean(0)).sum()
        y, share = y.to(kind), share.to(kind)
        weight, bias = p[m + "experts.gate_up_proj"], (p[m + "experts.gate_up_proj_bias"] * knobs.gate_up).to(kind)
        gate, up = (
            torch.matmul(y, weight[..., i::2]) + bias[:, None, i::2] for i in (0, 1)
        )  # [experts, tokens, inner]
        limit = gate.new_zeros(()) + knobs.limit  # no copy from the host, for CUDA graphs
        gate = torch.minimum(gate, limit)
        up = torch.maximum(torch.minimum(up, limit), -limit)
        inner = (up + knobs.one) * (gate * torch.sigmoid(gate * knobs.alpha)) * share.t()[..., None]
        inner = inner.to(kind).transpose(0, 1).flatten(1)  # [tokens, experts * inner]
        y = inner @ p[m + "experts.down_proj"].flatten(0, 1) + share @ (p[m + "experts.down_proj_bias"] * knobs.down)
        x = x + y.view(batch, tokens, -1)
    return rms_norm(x, p["model.norm.weight"], config.rms_norm_eps), balance / config.num_hidden_layers


def unused_logit_mass(config: GptOssConfig, rows: int) -> float:
    """The log of the unused rows' part of the softmax's denominator: each has the logit 0."""
    return math.log(config.vocab_size - rows)
