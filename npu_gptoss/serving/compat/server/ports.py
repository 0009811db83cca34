"""Chooses ports that stay free until vLLM listens on them.

vLLM asks the system for a free port, closes it, and binds it again seconds later in another process; each group of
ranks finds its store by such a port. The system chooses from the range that it also uses for outgoing connections and
for listeners without a port of their own, so another process may take the port in between.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from npu_gptoss.serving.compat.patch import around, expect_source, repair

RANGE = range(20_000, 30_000)  # above HCCL's 16666 and its kin, below Kubernetes' NodePort, which starts at 30000
_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")  # "32768\t60999" by default


def quiet_port() -> int | None:
    """Returns a TCP port, free on all interfaces, that the system does not hand out; None if there is none."""
    try:
        low, high = map(int, _GIVEN_AWAY.read_text().split())
    except (OSError, ValueError):
        return None  # another system, whose range is not known
    candidates = [port for port in RANGE if not low <= port <= high]
    chance = random.SystemRandom()  # every rank seeds the global generator alike
    for port in chance.sample(candidates, min(100, len(candidates))):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return None


@repair("ports", "vllm.utils:_get_open_port", until="0.23")
def install(module: ModuleType) -> None:
    """A server of several ranks sometimes ends at its start with EADDRINUSE: another process took a port between its
    choice and its use."""
    from vllm import envs

    expect_source(module._get_open_port, 's.bind(("", 0))', "envs.VLLM_PORT")
    expect_source(module.get_open_port, "_get_open_port()")

    @around(module, "_get_open_port")
    def _get_open_port(original: Callable[[], int]) -> int:
        asked = envs.VLLM_PORT is not None
        return original() if asked else quiet_port() or original()
