"""A process of torchrun: its device and its rank.

torchrun --nproc-per-node 2 -m npu_gptoss.cli generate --model gpt-oss-120b --prompt "…"
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
import torch.distributed as dist

from npu_gptoss.engine.device import resolve_device
from npu_gptoss.errors import InputError
from npu_gptoss.model.ranks import Ranks

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@contextmanager
def device_and_ranks(device: str, experts: str) -> Iterator[tuple[str, Ranks | None]]:
    """The device as asked for and None; under torchrun this process's own of that type, and its place.

    experts: as in `Shard`. An engine with graphs must be closed inside: at the end NCCL waits for every graph that
    holds a collective. After an error nothing is waited for, since the other ranks may be stuck; torchrun ends them.
    """
    if not dist.is_torchelastic_launched():
        yield device, None
        return
    if ":" in device:
        raise InputError(
            f"under torchrun each rank takes a device of its own: give the type only, got {device!r}", field="device"
        )
    kind = resolve_device(device).type
    own = kind if kind == "cpu" else f"{kind}:{os.environ['LOCAL_RANK']}"
    resolved = resolve_device(own)
    if kind != "cpu":
        torch.get_device_module(kind).set_device(resolved)
    dist.init_process_group(BACKENDS[kind])
    yield own, Ranks.of_this_process(experts)
    dist.destroy_process_group()


def is_rank_0() -> bool:
    """True for the process that prints: rank 0, or a process without ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def only_rank_0_speaks() -> Iterator[None]:
    """Discards the prints of other ranks, which compute the same. Errors are still raised."""
    if is_rank_0():
        yield
        return
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
