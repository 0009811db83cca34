"""The server's port, checked before its engine starts, and ports that stay free until vLLM listens on them.

vLLM asks the system for a free port, closes it, and binds it again seconds later in another process; each group of
ranks finds its store by such a port. The system chooses from the range that it also uses for outgoing connections and
for listeners without a port of their own, so another process may take the port in between.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import ModuleType

from npu_gptoss import envs
from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import API_SERVER, BOTH

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
    def _get_open_port(original: Original) -> int:
        asked = envs.VLLM_PORT is not None
        return original() if asked else quiet_port() or original()


@repair("server-port", f"{API_SERVER}:create_server_socket", releases=BOTH, until="0.33")
def install_port(api_server: ModuleType) -> None:
    """Two servers can listen on the same port, and each gets some of the requests."""
    expect_source(api_server.create_server_socket, "sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)")

    @around(api_server, "create_server_socket")
    def create_server_socket(original: Original, addr: tuple[str, int]) -> socket.socket:
        try:
            envs.get("NPU_GPTOSS_DRAIN_SECONDS")  # refuses a wrong value now, not at the server's end
        except InputError as error:
            raise SystemExit(str(error)) from None
        family = socket.AF_INET6 if ":" in addr[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(addr)
            except (OSError, OverflowError) as error:  # the second: above 65535
                raise SystemExit(
                    f"vllm serve: the server cannot listen on {addr[0] or 'any address'} port {addr[1]}: "
                    f"{getattr(error, 'strerror', error)}. Choose another with --port, or another address with --host."
                ) from None
        return original(addr)
