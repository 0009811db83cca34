"""Where the server listens, checked before its engine starts, and ports that stay free until vLLM listens on them.

vLLM asks the system for a free port, closes it, and binds it again seconds later in another process; each group of
ranks finds its store by such a port. The system chooses from the range that it also uses for outgoing connections and
for listeners without a port of their own, so another process may take the port in between.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from npu_gptoss import envs
from npu_gptoss.errors import InputError, Refusal, short
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import API_SERVER, BOTH, LAUNCHER

if TYPE_CHECKING:
    from argparse import Namespace

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
            except OSError as error:
                raise SystemExit(
                    f"vllm serve: the server cannot listen on {addr[0] or 'any address'} port {addr[1]}: "
                    f"{error.strerror}. Choose another with --port, or another address with --host."
                ) from None
        return original(addr)


_SOCKETS = Path("/proc/net/unix")  # a line for each socket of any process, with its path at the end
_SOCKET_AND_TLS = ("create_server_unix_socket", "validate_api_server_args")


@repair(
    "server-socket",
    f"{API_SERVER}:{' '.join(_SOCKET_AND_TLS)}",
    releases=BOTH,
    until="vLLM checks them first",
)
@repair(
    "server-socket",
    f"{LAUNCHER}:{' '.join(_SOCKET_AND_TLS)}",
    releases="0.33",
    until="vLLM checks them first",
)
def install_socket(module: ModuleType) -> None:
    """A wrong --ssl-… option is told after the engine's start, without the file's name, or gives plain HTTP; the --uds
    socket that a server leaves behind stops the next."""
    expect_source(module.create_server_unix_socket, "sock.bind(path)")
    expect_source(module.setup_server, "validate_api_server_args(args)")

    @around(module, "create_server_unix_socket")
    def create_server_unix_socket(original: Original, path: str) -> socket.socket:
        with _named(f"--uds {short(path)}", "a path for a new socket", "Choose another"):
            _remove_left_behind(Path(path))
            return original(path)

    @around(module, "validate_api_server_args")
    def validate_api_server_args(original: Original, args: Namespace) -> None:
        original(args)
        check_tls(args)


@contextlib.contextmanager
def _named(options: str, expected: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or error
        raise InputError(f"{options}: expected {expected}, got: {got}. {remedy}.", field=options.split()[0]) from None


def _remove_left_behind(path: Path) -> None:
    """Removes a socket that no process has. One that is bound may not listen yet: its server's engine is starting."""
    if not path.is_socket():
        return
    bound = (line.split(maxsplit=7)[7:] for line in _SOCKETS.read_text().splitlines())
    # as its process wrote it: perhaps a path from another folder
    held = any(str(path.absolute()).endswith(f"/{spelled.lstrip('/')}") for [spelled] in filter(None, bound))
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) and not held:
            path.unlink()


def check_tls(args: Namespace) -> None:
    """Raises InputError for options with which uvicorn could not speak TLS, or would not."""
    others = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh")
    given = {f"--{name.replace('_', '-')}": value for name in others if (value := getattr(args, name, None))}
    if not args.ssl_certfile:
        for option, value in given.items():
            got = None if value is True else value
            raise InputError(Refusal(option, got, "without --ssl-certfile the server speaks plain HTTP", "give it too"))
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = f"--ssl-certfile {short(args.ssl_certfile)}"
    pair += f" --ssl-keyfile {short(args.ssl_keyfile)}" if args.ssl_keyfile else ""
    with _named(pair, "a certificate and its key, in PEM", "Check the files"):
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, _no_password)
    with _named(f"--ssl-cert-reqs {args.ssl_cert_reqs}", "0, 1 or 2", "Give 2 to ask each client for a certificate"):
        asks = ssl.VerifyMode(args.ssl_cert_reqs)
    if args.ssl_ca_certs:
        with _named(f"--ssl-ca-certs {short(args.ssl_ca_certs)}", "certificates in PEM", "Check the file"):
            context.load_verify_locations(args.ssl_ca_certs)
    elif asks is ssl.CERT_REQUIRED:
        why = "no certificate of a client can be verified without --ssl-ca-certs"
        raise InputError(Refusal("--ssl-cert-reqs", args.ssl_cert_reqs, why, "give it too"))
    if ciphers := getattr(args, "ssl_ciphers", None):  # 0.11 has no such option
        with _named(f"--ssl-ciphers {short(ciphers)}", "OpenSSL's names", "`openssl ciphers` lists them"):
            context.set_ciphers(ciphers)


def _no_password() -> NoReturn:
    raise ValueError("a key with a password, for which vLLM has no option")
