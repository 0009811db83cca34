"""A port that vLLM chose for later is still free when vLLM listens on it.

vLLM asks the system for a free port, closes it, and binds it again seconds later, in another process: the store of each
group of ranks is found that way. The system's own choice is from the range of which it also takes the ports of
outgoing connections and of listeners that do not care, so that another process may hold the port by then.
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
    """A free TCP port of all interfaces that the system gives to nobody of its own will; None where there is none."""
    try:
        low, high = map(int, _GIVEN_AWAY.read_text().split())
    except (OSError, ValueError):
        return None  # another system, whose range is not known
    candidates = [port for port in RANGE if not low <= port <= high]
    chance = random.SystemRandom()  # every rank seeds the other one alike
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
    """A server of several ranks ends at its start, once in many, with EADDRINUSE: a port was taken between its choice
    and its use."""
    from vllm import envs

    expect_source(module._get_open_port, 's.bind(("", 0))', "envs.VLLM_PORT")
    expect_source(module.get_open_port, "_get_open_port()")

    @around(module, "_get_open_port")
    def _get_open_port(original: Callable[[], int]) -> int:
        asked = envs.VLLM_PORT is not None
        return original() if asked else quiet_port() or original()
