"""The fused path of the Ascend article on gpt-oss, re-created as kernels `article`, to be counted beside ours.

Never selected unless named: `NPU_GPTOSS_KERNEL_ATTENTION_PAGED=article` and so on, in a process that imported this
module. Written after the article's pin (taoyao1221/vllm-ascend c9b64052, `attention_v1.py` and `moe_mlp.py`), with the
sequence of operators kept and what they cost with it:

* attention: the query list made of tensors in every layer, FIA v2 with `learnable_sink` into a new tensor, which is
  copied to the output. One deviation: the article's mask is cut at -128 below the diagonal (with `pre_tokens` = 128),
  which the emulated operator refuses as undefined [R24]; here it is the plain triangle with 127, the same 128 keys;
* experts in the checkpoint's interleaved columns: biases cast to float32 in every call, for all experts; the activation
  in seven small operators; dispatch and combine as vllm-ascend 0.11.0's own all-gather way does them;
* routing: vllm-ascend 0.11.0's `select_experts`, weights cast to the model's dtype.

Around it is our model on vllm-ascend 0.11.0, where the article had a later vllm-ascend and vLLM's model: what differs
between the columns of the table is attention and experts only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

from npu_gptoss.attention.ascend import ASCEND, BLOCK_SIZES, HEAD_DIMS, UNLIMITED, causal_mask
from npu_gptoss.attention.metadata import AttentionMetadata
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.attention.window import keys_before
from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel
from npu_gptoss.moe.activation import SWIGLUOAI
from npu_gptoss.moe.operations import EXPERTS, ROUTE
from npu_gptoss.moe.weights import ExpertWeights


@register_kernel(
    PAGED,
    solution="article",
    capability=ASCEND,
    signatures=(accepts(query="bfloat16", kv="bfloat16", sinks="bfloat16"),),
    traits={"head_dim": HEAD_DIMS, "block_size": BLOCK_SIZES, "sliding_window": ANY},
    priority=Priority.REFERENCE,
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """`_forward_decode_only` and `_forward_prefill_cache_hit` of the article: FIA v2 with sinks, copied."""
    lengths = [b - a for a, b in zip(metadata.query_start_loc[:-1], metadata.query_start_loc[1:], strict=True)]
    query_ends = torch.tensor(lengths, dtype=torch.int32).cumsum(dim=0)
    before = keys_before(sliding_window)
    blocks, block_size = key_cache.shape[:2]
    result, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query,
        key_cache.view(blocks, block_size, -1),
        value_cache.view(blocks, block_size, -1),
        num_query_heads=query.shape[1],
        num_key_value_heads=key_cache.shape[2],
        input_layout="TND",
        pre_tokens=UNLIMITED if before is None else before,
        next_tokens=0,
        atten_mask=causal_mask(query.device),
        sparse_mode=3 if sliding_window is None else 4,
        softmax_scale=scale,
        block_table=metadata.block_table,
        block_size=block_size,
        actual_seq_qlen=query_ends.tolist(),
        actual_seq_kvlen=list(metadata.seq_lens),
        learnable_sink=sinks,
    )
    out[: result.shape[0]] = result


@register_kernel(
    ROUTE,
    solution="article",
    capability=ASCEND,
    signatures=(accepts(logits="bfloat16"),),
    traits={},
    priority=Priority.REFERENCE,
)
def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`select_experts` of vllm-ascend 0.11.0 and the cast behind it."""
    from vllm_ascend.ops.moe.experts_selector import select_experts

    weights, ids = select_experts(
        hidden_states=logits,  # looked at for prefetching only
        router_logits=logits,
        top_k=top_k,
        use_grouped_topk=False,
        renormalize=True,
        global_num_experts=logits.shape[1],
    )
    return weights.to(logits.dtype), ids


def swiglu_oai(gate_up: torch.Tensor) -> torch.Tensor:
    """The article's activation on interleaved columns, operator by operator."""
    alpha, limit = 1.702, 7.0
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    glu = gate * torch.sigmoid(gate * alpha)
    return (up + 1) * glu


def unquant_apply_mlp(
    hidden_states: torch.Tensor, weights: ExpertWeights, group_list: torch.Tensor, group_list_type: int
) -> torch.Tensor:
    """The article's function of that name: rows sorted by expert [rows, hidden] -> [rows, hidden]."""

    def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_grouped_matmul(
            x=[x],
            weight=[weight],
            bias=[bias.to(dtype=torch.float32)],
            split_item=2,
            group_list_type=group_list_type,
            group_type=0,
            group_list=group_list,
        )[0]

    inner = swiglu_oai(grouped_matmul(hidden_states, weights.gate_up_proj, weights.gate_up_proj_bias))
    return grouped_matmul(inner, weights.down_proj, weights.down_proj_bias)


@register_kernel(
    EXPERTS,
    solution="article",
    capability=ASCEND,
    signatures=(accepts(hidden="bfloat16", weight="bfloat16"),),
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": frozenset({False})},
    priority=Priority.REFERENCE,
)
def expert_mlp(
    hidden_states: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """vllm-ascend's dispatch, the article's experts, vllm-ascend's combine."""
    from vllm.forward_context import get_forward_context

    dispatcher: Any = get_forward_context().moe_comm_method.token_dispatcher
    sent = dispatcher.token_dispatch(hidden_states=hidden_states, topk_weights=topk_weights, topk_ids=topk_ids)
    rows = unquant_apply_mlp(sent["hidden_states"], weights, sent["group_list"], sent["group_list_type"])
    return dispatcher.token_combine(hidden_states=rows)
