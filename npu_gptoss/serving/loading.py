"""From the tensors of an official checkpoint to this rank's parameters: all of them, each once.

The parameters of our model carry the official names, except that q, k and v share one matrix. A tensor that nobody
wants, a parameter that nobody fills, a tensor that comes twice, in another shape or with a NaN in it: each is an error
that names it. Silent garbage from a swallowed tensor is this model's typical failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import nn

from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import CheckpointError, check_checkpoint, expand_stream
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import check_layout, check_names, check_tensor, expected_tensors
from npu_gptoss.model.values import checked_values

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoE

    from npu_gptoss.serving.model import Attention, GptOssForCausalLM


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor goes: the names of the parameters it fills (its part of), and how."""

    parameter: str
    place: Callable[[torch.Tensor], None]


def load_weights(
    model: GptOssForCausalLM,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: GptOssConfig,
    *,
    dtype: torch.dtype,
    where: str,
) -> set[str]:
    """Fills `model` from official names, BF16 or MXFP4 (expanded to `dtype` on the way). Returns the filled parameters.

    where: names the checkpoint in errors. Raises CheckpointError naming the tensor that is missing, unknown, repeated,
    or of another shape or dtype than `config` says.
    """
    placements = _placements(model)
    if not any(".experts." in name for name in placements):  # every stage has a layer, and every layer experts
        raise InputError(
            f"{where}: expected a model to fill, got one whose experts are prepared already. Weights cannot be loaded "
            "a second time: restart the server."
        )
    filled: set[str] = set()
    for name, tensor in expand_stream(checked_values(_accounted(weights, config, where), dtype, where), dtype):
        if name in placements:  # else it lives on another pipeline stage
            placements[name].place(tensor)
            filled.add(name)
    unfilled = sorted(placements[name].parameter for name in placements.keys() - filled)
    if unfilled:  # the checkpoint was complete, so a name of ours is not an official one
        raise RuntimeError(f"no tensor of gpt-oss fills {', '.join(unfilled)}")
    return {placement.parameter for placement in placements.values()}


def _accounted(
    weights: Iterable[tuple[str, torch.Tensor]], config: GptOssConfig, where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes the tensors on, each checked against what config.json promises; at the end, all must have come."""
    expected = expected_tensors(config)
    seen: set[str] = set()
    for name, tensor in _readable(weights, config, where):
        if name in seen:
            raise CheckpointError(f"{where}: {name} should come once, got it twice: the shards overlap.")
        seen.add(name)
        if name not in expected:
            check_layout([name], config, where)
            check_names([*expected, name], expected, where)
        check_tensor(name, tuple(tensor.shape), tensor.dtype, expected[name], where)
        yield name, tensor
        del tensor  # or it would stay in memory while the next one is read
    check_names(seen, expected, where)


def _readable(
    weights: Iterable[tuple[str, torch.Tensor]], config: GptOssConfig, where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes on what vLLM's loader reads. Which file it cannot read, and why, it does not say; the checkpoint does."""
    try:
        yield from weights
    except SafetensorError as error:
        if Path(where).is_dir():
            check_checkpoint(where, config)
        raise CheckpointError(f"{where}: a file cannot be read ({error}). Download it again.") from error


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
