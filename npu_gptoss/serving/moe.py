"""vLLM's mixture-of-experts layer over `npu_gptoss.moe`.

vLLM's `FusedMoE` keeps parallel groups, expert maps, reduction and the opaque op that hides the experts from
torch.compile. Weights and arithmetic come from the method below, which the layer takes from its `quant_config`: every
platform reads it before it creates weights, vllm-ascend's subclass of the layer too. So the experts are stored in the
checkpoint's own layout and never transposed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound
from npu_gptoss.model.config import packed_columns
from npu_gptoss.moe import ExpertWeights, Mxfp4Experts, bind_route, expert_mlp, mxfp4, prepare_experts, route
from npu_gptoss.serving.quantization import OurConfig
from npu_gptoss.serving.releases.vllm import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    UNUSED_EXPERTS_OPTIONS,
    FusedMoE,
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    activation_name,
)

DUMMY_SCALE = 115  # weights up to 6 * 2 ** -12, about as large as the dummy loader's


class GptOssExpertsMethod(FusedMoEMethodBase):
    """Creates, prepares and applies the experts of a layer on this rank."""

    unused_options: ClassVar[dict[str, Any]] = UNUSED_EXPERTS_OPTIONS

    def __init__(self, layer: FusedMoE, swiglu_limit: float, packed: bool = False) -> None:
        super().__init__(layer.moe_config)
        self.swiglu_limit = swiglu_limit
        self.packed = packed
        self.activation = layer.activation
        self._routes: dict[torch.dtype, Bound] = {}
        if not self.moe.has_bias:
            raise InputError(
                "the experts of gpt-oss have biases, but the layer was built with has_bias=False", field="has_bias"
            )

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
            activation=activation_name(self.activation),
            swiglu_limit=self.swiglu_limit,
            top_k=layer.top_k,
        )
        for name in layer.names_of_experts:
            delattr(layer, name)  # a second copy of the experts would take most of the device's memory

    def get_fused_moe_quant_config(self, layer: nn.Module) -> FusedMoEQuantConfig:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        renormalize: bool,
        activation: str = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """x [tokens, hidden], router_logits [tokens, experts] -> this rank's part of the sum [tokens, hidden]."""
        self._check(activation, renormalize, options)
        topk_weights, topk_ids = self.route(router_logits, top_k)
        return expert_mlp(x, layer.prepared_experts, topk_weights, topk_ids)

    def route(self, router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes with the kernel that was selected when logits of this dtype first came."""
        kernel = self._routes.get(router_logits.dtype)
        if kernel is None:
            kernel = self._routes[router_logits.dtype] = bind_route(router_logits.dtype)
        return route(router_logits, top_k, kernel=kernel)

    def _check(self, activation: str, renormalize: bool, options: dict[str, Any]) -> None:
        """Raises InputError if the layer asks at run time for other options than were prepared at load."""
        if activation != self.activation or not renormalize:
            raise InputError(
                f"the experts were prepared for activation {self.activation!r} and weights that sum to one, but are "
                f"asked for activation {activation!r} and renormalize={renormalize}",
                field="activation" if activation != self.activation else "renormalize",
            )
        for name, value in options.items():
            if name not in self.unused_options or value != self.unused_options[name]:
                raise InputError(
                    f"gpt-oss routes by softmax over the top k, without other options: got {name}={value}", field=name
                )


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
