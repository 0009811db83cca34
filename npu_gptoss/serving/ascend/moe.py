"""gpt-oss's experts between vllm-ascend's dispatch and combine.

vllm-ascend chooses for each step how tokens travel (all-gather, multicast, all-to-all, MC2). Its own experts drop the
biases and the activation. Where each rank has all tokens, our kernel sorts and sums them, in one launch less than
vllm-ascend; else we use `token_dispatch` and `token_combine` of its dispatchers, and compute with
`npu_gptoss.moe.ascend.grouped_mlp`, which takes counts and cumulative group lists alike.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.moe import expert_mlp
from npu_gptoss.moe.ascend import AscendExperts, grouped_mlp
from npu_gptoss.serving.moe import GptOssExpertsMethod, refuse_unknown
from npu_gptoss.serving.releases.ascend import TokenDispatcherWithAllGather, comm_method, dispatch, experts_result


class AscendExpertsMethod(GptOssExpertsMethod):
    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        expert_map: torch.Tensor | None = None,
        enable_force_load_balance: bool = False,
        mc2_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """x [tokens, hidden], router_logits [tokens, experts] of all tokens that this rank's experts receive."""
        refuse_unknown(options)
        prepared = layer.prepared_experts
        topk_weights, topk_ids = self.route(router_logits, top_k)
        if enable_force_load_balance:  # in the profile run, whose rows are equal
            topk_ids = torch.randint_like(topk_ids, 0, router_logits.shape[1])
        method = comm_method()
        if isinstance(method.token_dispatcher, TokenDispatcherWithAllGather):
            return experts_result(expert_mlp(x, prepared, topk_weights, topk_ids))
        if not isinstance(prepared.weights, AscendExperts):  # a kernel chosen by name, such as small_ops
            raise InputError(
                f"the kernel {prepared.kernel.name} works where every rank sees all tokens, and this step goes by "
                f"{type(method).__name__}; unset NPU_GPTOSS_KERNEL_MOE_EXPERTS"
            )
        ids = topk_ids.to(torch.int32)  # CANN's routing gives int32; another kernel may give int64
        rows, groups, kind, combine = dispatch(
            method, x, prepared.weights.weigh(topk_weights), ids, expert_map, mc2_mask
        )
        return experts_result(combine(grouped_mlp(rows, prepared.weights, groups, kind)))
