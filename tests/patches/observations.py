"""What vllm-ascend 0.11.0 does where a diff of `patches/vllm-ascend-0.11.0` repairs something, on the emulated 910B.

A function for each diff, named like it; it runs in a process of the emulated environment (`in_fork.py`) and returns
plain JSON values. The references are written out here, in float32. `EXPECTED` is what each sees.
"""

from __future__ import annotations

import types
from typing import Any

import torch

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 2, 64, 128
WINDOW = 128


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.float().cpu() - expected.float()).abs().max() <= 2e-2 * (1 + expected.abs().max()))


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def metadata(query_lens: list[int], seq_lens: list[int], padded: int, state: str) -> Any:
    """What the builder of vllm-ascend makes of a step; request r has the blocks 4 r, 4 r + 1, …"""
    from vllm_ascend.attention.attention_v1 import AscendAttentionMetadataBuilder, AscendAttentionState

    requests, total = len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    slots = [
        4 * r * BLOCK + p for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)) for p in range(s - q, s)
    ]
    mask = torch.triu(torch.ones(2048, 2048), diagonal=1)
    if state == "PrefillNoCache":
        mask = mask[: max(seq_lens), : max(seq_lens)].bfloat16()
    common = types.SimpleNamespace(
        num_reqs=requests,
        num_actual_tokens=total,
        num_input_tokens=padded,
        query_start_loc_cpu=starts,
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_tensor=(torch.arange(4 * requests, dtype=torch.int32).view(requests, 4)).npu(),
        slot_mapping=torch.tensor(slots, dtype=torch.int32).npu(),
        attn_mask=(mask if state == "PrefillNoCache" else mask.to(torch.int8)).npu(),
        attn_state=AscendAttentionState[state],
        max_query_len=max(query_lens),
        enable_dbo_across_dp=False,
    )
    builder = object.__new__(AscendAttentionMetadataBuilder)
    builder.device = torch.device("npu:0")
    return builder.build(common_prefix_len=0, common_attn_metadata=common)


def decode_query_list() -> dict[str, Any]:
    padded = metadata([1, 1, 1], [5, 6, 7], 5, "DecodeOnly")
    exact = metadata([1, 1, 1], [5, 6, 7], 3, "DecodeOnly")
    return {
        "query ends": padded.actual_seq_lengths_q,
        "key lengths": padded.seq_lens_list,
        "on the device": padded.query_start_loc.tolist(),
        "without padding": exact.actual_seq_lengths_q,
    }


def attention_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, window: Any) -> Any:
    """[queries, heads, head_dim] of one request whose last query is at the last key."""
    query, key, value = (part.float() for part in (query, key, value))
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    distance = torch.arange(len(key))[len(key) - len(query) :, None] - torch.arange(len(key))[None]
    hidden = (distance < 0) | (distance >= (window or len(key)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(query), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


def attention_sinks() -> dict[str, Any]:
    """Whether outputs are right, rows of padding zero, with and without sinks and window."""
    import vllm.forward_context
    from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

    vllm.forward_context._forward_context = types.SimpleNamespace(capturing=False)
    layer = types.SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, layer_name="layer")
    steps = {  # query lengths, sequence lengths, rows with padding
        "PrefillNoCache": ([200, 40], [200, 40], 240),
        "ChunkedPrefill": ([150, 1, 30], [310, 200, 30], 181),
        "DecodeOnly": ([1, 1, 1], [300, 129, 4], 4),
    }

    def right(state: str, sinks: torch.Tensor | None, window: int | None) -> bool:
        query_lens, seq_lens, rows = steps[state]
        extra = {} if sinks is None else {"sinks": sinks.npu()}
        impl = AscendAttentionBackendImpl(
            HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, None, window, "auto", None, "decoder", None, **extra
        )
        step = metadata(query_lens, seq_lens, rows, state)
        caches = [torch.zeros(12, BLOCK, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
        keys, values, queries = [], [], []
        for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
            key, value = (random(s, KV_HEADS, HEAD_DIM, seed=10 * r + i, scale=2.0) for i in range(2))
            for cache, whole in zip(caches, (key, value), strict=True):
                cache.view(-1, KV_HEADS, HEAD_DIM)[4 * r * BLOCK : 4 * r * BLOCK + s - q] = whole[: s - q]
            keys.append(key)
            values.append(value)
            queries.append(random(q, HEADS, HEAD_DIM, seed=10 * r + 2))
        expected = torch.cat(
            [attention_reference(*part, sinks, window) for part in zip(queries, keys, values, strict=True)]
        )

        def rows_of(parts: list[torch.Tensor]) -> torch.Tensor:
            new = torch.cat([part[len(part) - q :] for part, q in zip(parts, query_lens, strict=True)])
            return torch.cat((new, random(rows - len(new), *new.shape[1:], seed=99))).flatten(1).npu()

        output = torch.full((rows, HEADS, HEAD_DIM), torch.nan, dtype=torch.bfloat16).npu()
        impl.forward(
            layer,
            rows_of(queries),
            rows_of(keys),
            rows_of(values),
            tuple(cache.npu() for cache in caches),
            step,
            output,
            trace_flag=False,
        )
        torch.npu.synchronize()
        padding = output[len(expected) :].float()
        return close(output[: len(expected)], expected) and (sinks is None or bool((padding == 0).all()))

    sinks = random(HEADS, seed=7, scale=3.0)
    return {
        f"{state}, {name}": right(state, given, window)
        for state in steps
        for name, given, window in (("no sinks", None, None), ("sinks", sinks, None), ("and window", sinks, WINDOW))
    }


def moe_bias_activation() -> dict[str, Any]:
    import vllm.forward_context
    from vllm_ascend import ascend_config
    from vllm_ascend.ops import common_fused_moe
    from vllm_ascend.ops.moe.moe_comm_method import AllGatherCommImpl
    from vllm_ascend.ops.moe.token_dispatcher import TokenDispatcherWithAllGather

    experts, top_k, hidden, inner, rows = 4, 2, 64, 32, 6
    gate_up = random(experts, 2 * inner, hidden, seed=1, scale=0.5)
    down = random(experts, hidden, inner, seed=2, scale=0.5)
    gate_up_bias, down_bias = random(experts, 2 * inner, seed=3, scale=2.0), random(experts, hidden, seed=4, scale=2.0)
    x, logits = random(rows, hidden, seed=5), random(rows, experts, seed=6)
    common_fused_moe.is_enable_nz = lambda *args: False

    def run(activation: str, has_bias: bool) -> torch.Tensor:
        method = object.__new__(common_fused_moe.AscendUnquantizedFusedMoEMethod)
        torch.nn.Module.__init__(method)
        method.dynamic_eplb, method.transpose = False, True
        method.moe = types.SimpleNamespace(has_bias=has_bias)
        method._maybe_pad_weight = lambda weight: weight
        layer = torch.nn.Module()
        parameters = {"w13_weight": gate_up, "w2_weight": down}
        if has_bias:
            parameters |= {"w13_bias": gate_up_bias, "w2_bias": down_bias}
        for name, tensor in parameters.items():
            setattr(layer, name, torch.nn.Parameter(tensor.clone().npu(), requires_grad=False))
        method.process_weights_after_loading(layer)
        comm = object.__new__(AllGatherCommImpl)
        comm.mc2_mask = None
        comm.token_dispatcher = object.__new__(TokenDispatcherWithAllGather)
        TokenDispatcherWithAllGather.ep_group = None
        comm.token_dispatcher.__init__(top_k=top_k, num_experts=experts, num_local_experts=experts)
        vllm.forward_context._forward_context = types.SimpleNamespace(
            moe_comm_method=comm, weight_prefetch_method=None, capturing=False
        )
        return method.apply(
            layer=layer,
            x=x.npu(),
            use_grouped_topk=False,
            top_k=top_k,
            router_logits=logits.npu(),
            renormalize=True,
            global_num_experts=experts,
            activation=activation,
        )

    def reference(activation: str, has_bias: bool) -> torch.Tensor:
        weights, ids = logits.float().topk(top_k)
        result = torch.zeros(rows, hidden)
        for row in range(rows):
            for weight, expert in zip(weights[row].softmax(-1), ids[row], strict=True):
                inside = gate_up[expert].float() @ x[row].float() + has_bias * gate_up_bias[expert].float()
                if activation == "silu":
                    active = torch.nn.functional.silu(inside[:inner]) * inside[inner:]
                else:
                    gate, up = inside[::2].clamp(max=7.0), inside[1::2].clamp(-7.0, 7.0)
                    active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
                result[row] += weight * (down[expert].float() @ active + has_bias * down_bias[expert].float())
        return result

    def right(activation: str, has_bias: bool) -> Any:
        ascend_config._ASCEND_CONFIG = types.SimpleNamespace(init_redundancy_expert=0)
        try:
            return close(run(activation, has_bias), reference(activation, has_bias))
        except NotImplementedError as error:
            return str(error)
        finally:
            ascend_config.clear_ascend_config()

    return {
        "silu without biases": right("silu", False),
        "silu with biases": right("silu", True),
        "swigluoai without biases": right("swigluoai", False),
        "swigluoai with biases": right("swigluoai", True),
        "an activation that is not known": isinstance(right("gelu", False), str),
    }


def rotary(dtype: torch.dtype, **changes: Any) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_ascend.ops.rotary_embedding import AscendYaRNRotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return AscendYaRNRotaryEmbedding(
                HEAD_DIM, HEAD_DIM, 4096, 150000.0, True, 32.0, dtype, beta_fast=32.0, beta_slow=1.0, **changes
            )
        finally:
            torch.set_default_dtype(torch.float32)


def rope_buffer() -> dict[str, Any]:
    from vllm_ascend.ops.rotary_embedding import _rope_forward_oot

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer = rotary(dtype).npu()
        buffer = layer.cos_sin_cache
        query, key = random(3, HEADS * HEAD_DIM, seed=1), random(3, KV_HEADS * HEAD_DIM, seed=2)
        positions = torch.tensor([0, 7, 4000])
        cos, sin = buffer.cpu().float()[positions].chunk(2, dim=-1)
        first, second = query.float().view(3, HEADS, HEAD_DIM).chunk(2, dim=-1)
        expected = torch.cat(
            (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]), dim=-1
        )
        rotated, _ = _rope_forward_oot(layer, positions.npu(), query.npu(), key.npu(), True)
        found[f"{dtype} asked for"] = {
            "right": close(rotated, expected.flatten(1)),
            "buffer replaced in forward": layer.cos_sin_cache is not buffer,
            "bytes of a row": buffer.element_size() * HEAD_DIM,
        }
    return found


def yarn_truncate() -> Any:
    """The argument's way to vLLM's class, which is given a constructor that takes it."""
    from vllm.model_executor.layers.rotary_embedding import YaRNScalingRotaryEmbedding

    stock, taken = YaRNScalingRotaryEmbedding.__init__, []

    def __init__(self: Any, *args: Any, truncate: bool = True, **kwargs: Any) -> None:
        taken.append(truncate)
        stock(self, *args, **kwargs)

    YaRNScalingRotaryEmbedding.__init__ = __init__
    try:
        rotary(torch.bfloat16, truncate=False)
    except TypeError as error:
        return {"truncate": str(error).partition("__init__() ")[2]}
    rotary(torch.bfloat16)
    return {"truncate": taken}


def quantization_claim() -> dict[str, Any]:
    from vllm.platforms import current_platform
    from vllm_ascend.quantization.quant_config import AscendQuantConfig

    claim = AscendQuantConfig.override_quantization_method

    def verdict(method: str) -> str:
        try:
            current_platform.verify_quantization(method)
        except ValueError as error:
            return str(error)
        return "supported"

    return {
        "mxfp4": claim({"quant_method": "mxfp4"}, None),
        "mxfp4, with --quantization ascend": claim({"quant_method": "mxfp4"}, "ascend"),
        "ascend": claim({"quant_method": "ascend"}, None),
        "no method named": claim({}, None),
        "what the platform says of mxfp4": verdict("mxfp4"),
    }
