"""Loads the tensors of an official checkpoint into this rank's parameters: all of them, each once.

Our model's parameters have the official names, except that q, k and v share one matrix. Each of these is an error that
names the tensor: an unused tensor, a parameter without a tensor, a duplicate, another shape, a NaN. Silent garbage from
a swallowed tensor is this model's typical failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import nn

from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import CheckpointError, check_checkpoint, expand_stream
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import PACKED, accounted
from npu_gptoss.model.sharding import Shard
from npu_gptoss.model.values import checked_values
from npu_gptoss.serving.releases import here

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import FusedMoE


@dataclass(frozen=True)
class Placement:
    """The parameter that a checkpoint tensor fills (its part of), and the functions for it.

    cut: takes this rank's part of the tensor, or of a half of it that is still MXFP4, by its name. place: fills the
    parameter with the cut part, in the BF16 layout.
    """

    parameter: str
    place: Callable[[torch.Tensor], None]
    cut: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor


def load_weights(
    model: nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: GptOssConfig,
    *,
    dtype: torch.dtype,
    where: str,
) -> set[str]:
    """Fills `model` from official names, BF16 or MXFP4 (expanded to `dtype` on the way, unless the model has parameters
    for the two halves). Returns the filled parameters.

    where: names the checkpoint in errors. Raises CheckpointError naming the tensor that is missing, unknown, repeated,
    or of another shape or dtype than `config` says.
    """
    placements = _placements(model, config)
    if not any(".experts." in name for name in placements):  # every stage has a layer, and every layer experts
        raise InputError(
            f"{where}: expected a model to fill, got one whose experts are prepared already. On vLLM {here().name} "
            "weights are loaded once, also after sleep at level 2: restart the server with the new checkpoint.",
            field="weights",
        )
    filled: set[str] = set()
    tensors = checked_values(accounted(readable(weights, config, where), config, where), dtype, where)
    for name, tensor in expand_stream(_cut(tensors, placements), dtype, placements):
        placements[name].place(tensor)
        filled.add(name)
    unfilled = sorted(placements[name].parameter for name in placements.keys() - filled)
    if unfilled:  # the checkpoint was complete, so one of our names is not official
        raise RuntimeError(f"no tensor of gpt-oss fills {', '.join(unfilled)}")
    return {placement.parameter for placement in placements.values()}


def readable(
    weights: Iterable[tuple[str, torch.Tensor]], config: GptOssConfig, where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes on the tensors of vLLM's loader, and names the unreadable file, which the loader does not."""
    scales = getattr(torch, "float8_e8m0fnu", None)  # MXFP4's, which are bytes in the official files
    try:
        yield from ((name, tensor.view(torch.uint8) if tensor.dtype == scales else tensor) for name, tensor in weights)
    except SafetensorError as error:
        if Path(where).is_dir():
            check_checkpoint(where, config)
        raise CheckpointError(f"{where}: a file cannot be read ({error}). Download it again.") from error


def _cut(
    tensors: Iterable[tuple[str, torch.Tensor]], placements: Mapping[str, Placement]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Cuts this rank's part from each tensor before it is expanded: on four ranks a quarter of the work and memory.

    Drops tensors of another pipeline stage.
    """
    for name, tensor in tensors:
        packed = PACKED.fullmatch(name)
        placement = placements.get(name) or (placements.get(packed["name"]) if packed else None)
        if placement is not None:
            yield name, placement.cut(name, tensor)
        del tensor  # or it would stay in memory while the next one is read


def _placements(model: nn.Module, config: GptOssConfig) -> dict[str, Placement]:
    """One entry for each official tensor that has a parameter on this rank."""
    parameters = dict(model.named_parameters())
    found: dict[str, Placement] = {}

    for name, parameter in parameters.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if ".qkv_proj." in name:
            for shard in "qkv":
                official = name.replace(".qkv_proj.", f".{shard}_proj.")
                found[official] = Placement(name, _sharded(parameter, shard))
        elif name.endswith(".sinks"):
            heads = Shard(module.first_head // module.num_heads, config.num_attention_heads // module.num_heads)
            found[name] = Placement(name, parameter.data.copy_, heads.cut)
        elif ".experts." in name:
            found[name] = _experts(name, parameter, module)
        elif hasattr(parameter, "weight_loader"):
            found[name] = Placement(name, _sharded(parameter))
        else:
            found[name] = Placement(name, parameter.data.copy_)
    return found


def _sharded(parameter: nn.Parameter, *shard: str) -> Callable[[torch.Tensor], None]:
    """Returns a function that lets vLLM's parallel layer cut out this rank's part."""

    def place(tensor: torch.Tensor) -> None:
        parameter.weight_loader(parameter, tensor, *shard)

    return place


def _experts(name: str, parameter: nn.Parameter, experts: FusedMoE) -> Placement:
    """Places this rank's experts with their share of the intermediate size (gate and up columns stay pairs)."""
    shard = Shard(experts.tp_rank, experts.tp_size)

    def cut(official: str, tensor: torch.Tensor) -> torch.Tensor:
        if (expert_map := experts.expert_map) is not None:  # global id -> local, -1 elsewhere
            ids = torch.nonzero(expert_map >= 0).flatten()
            tensor = tensor[ids[expert_map[ids].argsort()].to(tensor.device)]
        return shard.cut(official, tensor)

    def place(tensor: torch.Tensor) -> None:
        width = experts.intermediate_size_per_partition
        own = shard.own_pairs(name, parameter.data, width)
        if own.shape != parameter.shape:
            parameter.data.zero_()
        own.copy_(shard.trim(name, tensor, width))

    return Placement(name, place, cut)
