"""vLLM's mixture-of-experts layer over `npu_gptoss.moe`.

vLLM's `FusedMoE` keeps parallel groups, expert maps, reduction and the opaque op that hides the experts from
torch.compile. Weights and arithmetic come from the method below, which the layer takes from its `quant_config`: every
platform reads it before it creates weights, vllm-ascend's subclass of the layer too. So the experts are stored in the
checkpoint's own layout and never transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound
from npu_gptoss.model.config import packed_columns
from npu_gptoss.moe import ExpertWeights, Mxfp4Experts, bind_route, expert_mlp, mxfp4, prepare_experts, route
from npu_gptoss.serving.quantization import OurConfig
from npu_gptoss.serving.releases.vllm import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoE,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
)

# Settings of vLLM's layer that our kernels know one value of: softmax over the top k, in no groups
ROUTING = {
    "renormalize": True,
    "use_grouped_topk": False,
    "custom_routing_function": None,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "e_score_correction_bias": None,
    "apply_router_weight_on_input": False,
}
# Other options that vLLM's and vllm-ascend's layers pass in a step: settings again, and what gpt-oss has no use for
_PASSED = """
    activation global_num_experts num_experts expert_map topk_group num_expert_group enable_eplb expert_load_view
    logical_to_physical_map logical_replica_count quantized_x_for_share dynamic_scale_for_share shared_experts log2phy
    global_redundant_expert_num pertoken_scale
"""
PASSED = {*ROUTING, *_PASSED.split()}
DUMMY_SCALE = 115  # weights up to 6 * 2 ** -12, about as large as the dummy loader's


class GptOssExpertsMethod(FusedMoEMethodBase):
    """Creates, prepares and applies the experts of a layer on this rank."""

    def __init__(self, layer: FusedMoE, swiglu_limit: float, packed: bool = False) -> None:
        super().__init__(layer.moe_config)
        self.swiglu_limit = swiglu_limit
        self.packed = packed
        self.activation = layer.activation
        self._routes: dict[torch.dtype, Bound] = {}
        built = {name: getattr(layer, name) for name in ROUTING} | {"has_bias": self.moe.has_bias}
        for name, expected in {**ROUTING, "has_bias": True}.items():
            if built[name] != expected:
                raise InputError(f"gpt-oss's experts have {name}={expected!r}, got {built[name]!r}", field=name)

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Creates the official layout, in BF16 or MXFP4 (see `ExpertWeights`, `Mxfp4Experts`). Biases start as NaN, so
        that a bias that is not loaded is noticed. Packed, a rank has the whole groups around its columns
        (`Shard.own_pairs`).

        vLLM's dummy loader (`--load-format dummy`) fills only floats. Any byte is two valid codes, but not any byte is
        a valid scale, so scales are filled here."""
        width = intermediate_size_per_partition
        if self.packed:
            width = packed_columns(layer.tp_rank, width)
        num_experts = int(num_experts)  # vllm-ascend counts them in a tensor
        shapes = {"gate_up_proj_bias": (2 * width,), "down_proj_bias": (hidden_size,)}
        if self.packed:
            for name, rows, columns in (("gate_up", 2 * width, hidden_size), ("down", hidden_size, width)):
                groups = columns // mxfp4.GROUP
                shapes[f"{name}_proj_blocks"] = (rows, groups, mxfp4.GROUP // 2)
                shapes[f"{name}_proj_scales"] = (rows, groups)
        else:
            shapes |= {"gate_up_proj": (hidden_size, 2 * width), "down_proj": (width, hidden_size)}
        for name, shape in shapes.items():
            dtype = torch.uint8 if name.endswith(("_blocks", "_scales")) else params_dtype
            empty = torch.empty((num_experts, *shape), dtype=dtype)
            if name.endswith("bias"):
                empty.fill_(float("nan"))
            elif name.endswith("_scales"):
                empty.fill_(DUMMY_SCALE)
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        layer.names_of_experts = tuple(shapes)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Passes the loaded weights to the selected kernel, which then owns them."""
        weights = {name: getattr(layer, name).data for name in layer.names_of_experts}
        for name, tensor in weights.items():
            if name.endswith("bias") and not torch.isfinite(tensor).all():
                raise InputError(
                    f"{layer.layer_name}.{name} was not filled by the checkpoint, or is not finite",
                    field=f"{layer.layer_name}.{name}",
                )
        expert_map = getattr(layer, "expert_map", None)
        layer.prepared_experts = prepare_experts(
            (Mxfp4Experts if self.packed else ExpertWeights)(
                **weights, expert_map=None if expert_map is None else expert_map.long()
            ),
            activation=self.activation,
            swiglu_limit=self.swiglu_limit,
            top_k=layer.top_k,
        )
        for name in layer.names_of_experts:
            delattr(layer, name)  # a second copy of the experts would take most of the device's memory

    def get_fused_moe_quant_config(self, layer: nn.Module) -> FusedMoEQuantConfig:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self, layer: nn.Module, x: torch.Tensor, router_logits: torch.Tensor, top_k: int, **options: Any
    ) -> torch.Tensor:
        """x [tokens, hidden], router_logits [tokens, experts] -> this rank's part of the sum [tokens, hidden]."""
        refuse_unknown(options)
        topk_weights, topk_ids = self.route(router_logits, top_k)
        return expert_mlp(x, layer.prepared_experts, topk_weights, topk_ids)

    def route(self, router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes with the kernel that was selected when logits of this dtype first came."""
        kernel = self._routes.get(router_logits.dtype)
        if kernel is None:
            kernel = self._routes[router_logits.dtype] = bind_route(router_logits.dtype)
        return route(router_logits, top_k, kernel=kernel)


def refuse_unknown(options: Mapping[str, Any]) -> None:
    for name in options.keys() - PASSED:
        raise InputError(f"gpt-oss's experts have no option {name}, got {options[name]!r}", field=name)


class ExpertsConfig(OurConfig):
    """Carries the experts' method to the layer. packed: the experts stay in MXFP4 (`expert_weights.kept_packed`)."""

    def __init__(self, method: type[GptOssExpertsMethod], swiglu_limit: float, packed: bool) -> None:
        super().__init__()
        self.method = method
        self.swiglu_limit = swiglu_limit
        self.packed = packed

    def get_quant_method(self, layer: nn.Module, prefix: str, tid2eid: None = None) -> GptOssExpertsMethod:
        return self.method(layer, self.swiglu_limit, self.packed)

    def get_name(self) -> str:
        return "gptoss_experts"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ExpertsConfig:
        raise NotImplementedError("made by the model for its own layers, never from a checkpoint")
