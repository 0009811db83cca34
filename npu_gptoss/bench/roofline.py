"""The least that a step of gpt-oss must move and compute, and the time that takes at a machine's ceilings.

Bytes: each weight that takes part once (of the experts, the distinct ones that the step's tokens are routed to), each
visible key and value once, activations at six reads and six writes of the residual stream a layer. Operations: two a
multiply-add of every product, four a visible (query, key, channel) of attention; a causal prefill of n tokens sees
n * n / 2 keys. The floor is the larger of bytes / bandwidth and operations / arithmetic rate; nothing overlaps better
than perfectly.

How many experts are distinct is counted from the run's own routing where it can be seen, else expected under uniform
independent routing: n = E * (1 - (1 - k / E) ** tokens), an upper estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.nominal import BANDWIDTH

# bytes a weight, scales included: MXFP4 four bits and a byte a group of 32, FP8 one float32 a block of 128 x 128
WEIGHT_BYTES = {"mxfp4": 4.25 / 8, "fp8": 1 + 4 / 128**2, "bf16": 2.0}
BF16_BYTES, FP32_BYTES = 2, 4
_ACTIVATION_PASSES = 12  # reads and writes of [tokens, hidden] in bfloat16 in a layer


@dataclass(frozen=True)
class Ceilings:
    """The most that a machine can do: bytes/s of its memory, operations/s of its matrix units in bfloat16."""

    name: str
    bytes_per_s: float
    flops_per_s: float

    def of(self, count: int) -> Ceilings:
        """Returns the ceilings of so many such machines together."""
        if count == 1:
            return self
        return Ceilings(f"{count} x {self.name}", count * self.bytes_per_s, count * self.flops_per_s)


# 790 TFLOP/s: an 8192 x 8192 x 8192 product of random bfloat16 through the library.
_H200 = "NVIDIA H200"
H200 = Ceilings("H200 nominal", BANDWIDTH[_H200] * 1e9, 790e12)
NOMINAL = {_H200: H200}


@dataclass(frozen=True)
class Work:
    """The bytes of one step or call by purpose, and its operations."""

    expert_bytes: float = 0.0
    dense_bytes: float = 0.0  # attention's projections, norms, sinks, router, head
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Work)))

    @property
    def bytes(self) -> float:
        return self.expert_bytes + self.dense_bytes + self.kv_bytes + self.activation_bytes

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds below which no version can run."""
        return max(self.bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)


def beside_floor(work: Work, seconds: float, ceilings: Sequence[Ceilings], unit: str) -> dict[str, float | int]:
    """The fields of a record that rate a time: work, rates, floors in `unit` ("ms" or "us").

    ceilings: the first gives the floor; after nominal ceilings come the ceilings measured in the same run.
    """
    scale = {"ms": 1e3, "us": 1e6}[unit]
    floors = [work.floor_s(each) for each in ceilings]
    return {
        "bytes": round(work.bytes),
        "flops": round(work.flops),
        f"floor_{unit}": floors[0] * scale,
        "TBps": work.bytes / seconds / 1e12,
        "TFLOPs": work.flops / seconds / 1e12,
        "percent_of_floor": 100 * floors[0] / seconds,
        **{f"floor_measured_{unit}": floor * scale for floor in floors[1:]},
    }


def expected_distinct(experts: int, top_k: int, tokens: int) -> float:
    """Experts that at least one of `tokens` is routed to, under uniform independent routing."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def attention_parameters(config: GptOssConfig) -> int:
    """Counts the parameters of one layer outside its experts and router: projections with biases, both norms, sinks."""
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    return (hidden + 1) * (query + 2 * kv) + (query + 1) * hidden + 2 * hidden + config.num_attention_heads


def router_parameters(config: GptOssConfig) -> int:
    return (config.hidden_size + 1) * config.num_local_experts


def expert_parameters(config: GptOssConfig) -> tuple[int, int]:
    """Counts the parameters of one expert: weights (in the experts' format), biases (in bfloat16)."""
    return 3 * config.hidden_size * config.intermediate_size, 2 * config.intermediate_size + config.hidden_size


def expert_bytes(config: GptOssConfig, weights: str) -> float:
    """One expert with its biases."""
    matrix, bias = expert_parameters(config)
    return matrix * WEIGHT_BYTES[weights] + bias * BF16_BYTES


def head_parameters(config: GptOssConfig) -> int:
    return config.vocab_size * config.hidden_size


def kv_bytes_per_token(config: GptOssConfig) -> int:
    """Keys and values of one position in one layer, bfloat16."""
    return 2 * config.num_key_value_heads * config.head_dim * BF16_BYTES


def attention_decode_work(config: GptOssConfig, contexts: Sequence[int], window: int | None) -> Work:
    """One layer's attention alone for one token of each request: its visible keys and values."""
    keys = sum(context if window is None else min(context, window) for context in contexts)
    return _attention_work(config, keys, keys)


def attention_prefill_work(config: GptOssConfig, tokens: int, window: int | None) -> Work:
    """One layer's causal attention alone over a prompt of `tokens`: n * n / 2 (query, key) pairs of a full layer.

    Of a window layer n * window, as if the window were full from the first row on.
    """
    pairs = tokens * tokens / 2 if window is None else tokens * min(window, tokens)
    return _attention_work(config, tokens, pairs)


def _attention_work(config: GptOssConfig, keys: float, pairs: float) -> Work:
    flops = 4 * config.num_attention_heads * config.head_dim * pairs
    return Work(kv_bytes=keys * kv_bytes_per_token(config), flops=flops)


def dense_bytes(config: GptOssConfig) -> int:
    """Everything outside the experts once: projections, norms, sinks, routers, head."""
    layers = config.num_hidden_layers
    total = layers * (attention_parameters(config) + router_parameters(config)) + head_parameters(config)
    return total * BF16_BYTES


def decode_work(
    config: GptOssConfig, contexts: Sequence[int], weights: str, distinct: Sequence[float] | None = None
) -> Work:
    """One decode step: a token of each request.

    contexts: the keys that each request's token sees. distinct: the distinct experts of each layer as counted; None:
    as expected under uniform routing.
    """
    layers, batch = config.num_hidden_layers, len(contexts)
    if distinct is None:
        distinct = [expected_distinct(config.num_local_experts, config.num_experts_per_tok, batch)] * layers
    if len(distinct) != layers:
        raise InputError(f"the distinct experts must be given for each of {layers} layers, got {len(distinct)}")
    attention = [attention_decode_work(config, contexts, config.window(layer)) for layer in range(layers)]
    return sum(attention, _step(config, batch, batch, weights, distinct))


def prefill_work(config: GptOssConfig, tokens: int, weights: str) -> Work:
    """One prompt from an empty cache to the logits of its last token, as one step: all experts are read once."""
    layers = config.num_hidden_layers
    distinct = [expected_distinct(config.num_local_experts, config.num_experts_per_tok, tokens)] * layers
    attention = [attention_prefill_work(config, tokens, config.window(layer)) for layer in range(layers)]
    return sum(attention, _step(config, tokens, 1, weights, distinct))


def _step(config: GptOssConfig, tokens: int, logits: int, weights: str, distinct: Sequence[float]) -> Work:
    """All but attention's keys and scores; `logits` of the tokens go through the head."""
    layers = config.num_hidden_layers
    matrix, _ = expert_parameters(config)
    router = config.hidden_size * config.num_local_experts
    layer = attention_parameters(config) + router + config.num_experts_per_tok * matrix
    return Work(
        expert_bytes=sum(distinct) * expert_bytes(config, weights),
        dense_bytes=dense_bytes(config),
        activation_bytes=tokens * layers * config.hidden_size * BF16_BYTES * _ACTIVATION_PASSES,
        flops=2 * tokens * layers * layer + 2 * logits * head_parameters(config),
    )


def experts_work(config: GptOssConfig, tokens: int, weights: str, distinct: float) -> Work:
    """The routed experts of one layer, without activations: the least that a fused kernel must read and compute."""
    matrix, _ = expert_parameters(config)
    return Work(
        expert_bytes=distinct * expert_bytes(config, weights), flops=2 * tokens * config.num_experts_per_tok * matrix
    )


def linear_work(rows: int, inputs: int, outputs: int) -> Work:
    """One dense product in bfloat16 with its weight, input and result."""
    return Work(
        dense_bytes=inputs * outputs * BF16_BYTES,
        activation_bytes=rows * (inputs + outputs) * BF16_BYTES,
        flops=2 * rows * inputs * outputs,
    )


def dollars_per_million(tokens: float, seconds: float, price_per_hour: float) -> float:
    """`tokens` in `seconds` on a machine at `price_per_hour` dollars -> dollars a million tokens."""
    return price_per_hour / 3600 * seconds / tokens * 1e6
