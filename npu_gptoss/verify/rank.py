"""The sizes at which self-tests check a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from npu_gptoss import envs


@dataclass(frozen=True)
class Rank:
    """The part of the model on one device. inner: columns of each expert; held: experts [first, last) of `experts`.

    repeats: how often a right result is computed in all, to compare the bits. short: the calls of a server's start
    alone, which take a second. The defaults are gpt-oss-20b on one card.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 1
    hidden: int = 2880
    inner: int = 2880
    experts: int = 32
    held: tuple[int, int] = (0, 32)
    heads: int = 64
    kv_heads: int = 8
    short: bool = False

    @property
    def is_part(self) -> bool:
        """Another rank holds the rest of the experts."""
        return self.held != (0, self.experts)

    @property
    def part(self) -> Rank:
        """A rank with the second quarter of the experts."""
        return replace(self, held=(self.experts // 4, self.experts // 2))


def is_slow(device: torch.device) -> bool:
    """A CPU, or the emulated 910B, which computes on one."""
    return device.type == "cpu" or envs.get("ASCEND_EMULATOR")


def whole(device: torch.device, repeats: int) -> Rank:
    """gpt-oss-20b on one card; a small model where that would take long."""
    if not is_slow(device):
        return Rank(device, repeats=repeats)
    return Rank(device, torch.bfloat16, min(repeats, 2), 96, 64, 8, (0, 8), 8, 1)
