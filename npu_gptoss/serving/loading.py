"""From the tensors of an official checkpoint to this rank's parameters: all of them, each once.

The parameters of our model carry the official names, except that q, k and v share one matrix. A tensor that nobody
wants, a parameter that nobody fills, a tensor that comes twice or in another shape: each is an error that names it.
Silent garbage from a swallowed tensor is this model's typical failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import expand_stream, expected_tensors
from npu_gptoss.model.config import GptOssConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoE

    from npu_gptoss.serving.model import Attention, GptOssForCausalLM


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: the names of the parameters it fills (its part of), and how."""

    parameter: str
    place: Callable[[torch.Tensor], None]


def load_weights(
    model: GptOssForCausalLM, weights: Iterable[tuple[str, torch.Tensor]], config: GptOssConfig, dtype: torch.dtype
) -> set[str]:
    """Fills `model` from official names, BF16 or MXFP4 (expanded to `dtype` on the way). Returns the filled parameters.

    Raises InputError naming the tensor that is missing, unknown, repeated or of another shape than `config` says.
    """
    expected = expected_tensors(replace(config, quantization=None))
    placements = _placements(model)
    seen: set[str] = set()
    for name, tensor in expand_stream(weights, dtype):
        if name not in expected:
            raise InputError(f"the checkpoint holds {name}, which no part of gpt-oss uses; is it another model's?")
        if name in seen:
            raise InputError(f"the checkpoint holds {name} twice; its shards overlap")
        if tuple(tensor.shape) != tuple(expected[name].shape):
            shape = list(expected[name].shape)
            raise InputError(f"{name} should be {shape} by config.json, but is {list(tensor.shape)}")
        seen.add(name)
        if name in placements:  # else it lives on another pipeline stage
            placements[name].place(tensor)
    missing = [name for name in expected if name not in seen]
    if missing:
        raise InputError(
            f"the checkpoint lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}; "
            "download it again, and check that model.safetensors.index.json lists every file"
        )
    return {placement.parameter for placement in placements.values()}


def _placements(model: GptOssForCausalLM) -> dict[str, Placement]:
    """One entry for each official tensor that has a parameter on this rank."""
    parameters = dict(model.named_parameters())
    found: dict[str, Placement] = {}

    def add(name: str, parameter: str, place: Callable[[torch.Tensor], None]) -> None:
        found[name] = Placement(parameter, place)

    for name, parameter in parameters.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if ".qkv_proj." in name:
            for shard in "qkv":
                official = name.replace(".qkv_proj.", f".{shard}_proj.")
                add(official, name, _sharded(parameter, shard))
        elif name.endswith(".sinks"):
            add(name, name, _heads(parameter, module))
        elif ".experts." in name:
            add(name, name, _experts(name.rpartition(".")[2], parameter, module))
        elif hasattr(parameter, "weight_loader"):
            add(name, name, _sharded(parameter))
        else:
            add(name, name, parameter.data.copy_)
    return found


def _sharded(parameter: nn.Parameter, *shard: str) -> Callable[[torch.Tensor], None]:
    """vLLM's parallel layers cut out this rank's part themselves."""

    def place(tensor: torch.Tensor) -> None:
        parameter.weight_loader(parameter, tensor, *shard)

    return place


def _heads(parameter: nn.Parameter, attention: Attention) -> Callable[[torch.Tensor], None]:
    """The sinks of this rank's query heads."""

    def place(tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor[attention.first_head :][: attention.num_heads])

    return place


def _experts(kind: str, parameter: nn.Parameter, experts: FusedMoE) -> Callable[[torch.Tensor], None]:
    """This rank's experts, and of each its share of the intermediate size (gate and up columns stay pairs)."""

    def place(tensor: torch.Tensor) -> None:
        width = experts.intermediate_size_per_partition
        first = experts.tp_rank * width
        if kind == "down_proj":
            tensor = tensor[:, first : first + width]
        elif kind != "down_proj_bias":
            tensor = tensor[..., 2 * first : 2 * (first + width)]
        elif experts.tp_rank:  # the partial sums of all ranks are added up: one of them brings the bias
            tensor = torch.zeros_like(tensor)
        if experts.expert_map is not None:
            tensor = tensor[_local_experts(experts.expert_map).to(tensor.device)]
        parameter.data.copy_(tensor)

    return place


def _local_experts(expert_map: torch.Tensor) -> torch.Tensor:
    """Global ids of the local experts, in local order, from the map global -> local (-1: elsewhere)."""
    ids = torch.nonzero(expert_map >= 0).flatten()
    return ids[expert_map[ids].argsort()]
