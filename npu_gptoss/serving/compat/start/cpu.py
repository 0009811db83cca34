"""vLLM 0.11 on a CPU, and gpt-oss's windows."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import Mismatch, Original, around, expect_source, repair

if TYPE_CHECKING:
    import torch


@repair(
    "model-wide-window",
    "vllm.config.model:ModelConfig.get_sliding_window",
    upstream="vllm issue 23934 (open); no repair found",
    essential=True,
    until="0.23",
)
def install_window(module: ModuleType) -> None:
    """vLLM refuses any model with a sliding window on a CPU, and applies one window to all layers if each has one; in
    gpt-oss the window differs by layer, and our model passes it to the attention.

    The window of config.json has two users: the check for the V1 engine, and `cache_config`, from which `Attention`
    takes it for every layer that names no window.
    """
    model_config = module.ModelConfig
    expect_source(model_config.get_sliding_window, 'getattr(self.hf_text_config, "sliding_window", None)')

    @around(model_config, "get_sliding_window")
    def get_sliding_window(original: Original, self: Any) -> int | None:
        if self.hf_text_config.model_type == MODEL_TYPE and not self.disable_sliding_window:
            return None
        return original(self)


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenates the rows of all ranks, `sizes` of each. gloo gathers equal shapes only."""
    import torch

    if not isinstance(input_, torch.Tensor):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    parts = [input_.new_empty((rows, *input_.shape[1:])) for rows in sizes]
    parts[self.rank_in_group].copy_(input_)
    for rank, part in zip(self.ranks, parts, strict=True):
        torch.distributed.broadcast(part, src=rank, group=self.device_group)
    return torch.cat(parts, dim)


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    """Returns this rank's rows of the sum over all ranks."""
    return self.all_reduce(input_.contiguous()).split(sizes, dim)[self.rank_in_group]


@repair(
    "cpu-experts-exchange",
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.__init__",
    upstream="0.33.0 has it",
    until="0.23",
    essential=True,
)
def install_exchange(module: ModuleType) -> None:
    """Data parallel engines on CPUs share each layer's experts and exchange nothing: every answer is garbage.

    Each engine needs the rows of all engines, and its own rows of their sum. vLLM leaves that to the group's
    communicator, and the communicator for CPUs does nothing.
    """
    communicator = module.CpuCommunicator
    if "dispatch" in vars(communicator):
        raise Mismatch("CpuCommunicator has its own dispatch; is it repaired already?")
    expect_source(communicator.__init__, "super().__init__(cpu_group, device, device_group, unique_name)")

    @around(communicator, "__init__")
    def __init__(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.all_gatherv = functools.partial(all_gatherv, self)
        self.reduce_scatterv = functools.partial(reduce_scatterv, self)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)
            self.dispatch, self.combine = self.all2all_manager.dispatch, self.all2all_manager.combine
