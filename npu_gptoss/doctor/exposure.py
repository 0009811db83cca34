"""Checks who can reach the running servers, and that a key protects them.

Reads the command and the environment of each `vllm serve` from /proc, as far as this user may. Reports no key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from npu_gptoss import envs
from npu_gptoss.doctor.findings import Finding, failed, ok, warning
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.doctor.stack import numbers

PAGE = "docs/exposing-the-server.md"
GUARD = "admission"  # the patch of vLLM that checks the key
STARLETTE_MENDED = (1, 0, 1)  # CVE-2026-48710; vLLM's own check of the key rests on it
CONFIG = re.compile(r"^([\w-]+):[ \t]*(.*?)[ \t]*(?: #.*)?$", re.M)  # a line of the file that --config names
SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")


@dataclass(frozen=True)
class Server:
    """words: the options in --config's file, then the command. `environ` is None where this user may not read it."""

    pid: int
    words: tuple[str, ...]
    environ: Mapping[str, str] | None

    def option(self, name: str, default: str) -> str:
        """The last value of a flag, as vLLM's parser takes it."""
        return option(self.words, name, default)

    @property
    def host(self) -> str:
        return self.option("--host", "all addresses")

    @property
    def socket(self) -> str:
        return self.option("--uds", "")

    @property
    def keyed(self) -> bool:
        by_flag = any(re.match("--api[-_]k", word) for word in self.words)
        return by_flag or bool((self.environ or {}).get("VLLM_API_KEY"))

    @property
    def place(self) -> str:
        where = self.socket or f"{self.host} port {self.option('--port', '8000')}"
        return f"{where} (process {self.pid})"


def servers(here: Machine) -> list[Server]:
    found = []
    for folder in sorted(here.path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words = tuple((folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0"))
        except OSError:  # it has ended
            continue
        if not _serves(words) or "--headless" in words:  # a node without a port
            continue
        words = (*_configured(here, folder, words), *words)
        if any(words == server.words for server in found):  # a process that a server has forked keeps its command
            continue
        try:
            text = (folder / "environ").read_bytes().decode(errors="replace")
            environ = dict(pair.partition("=")[::2] for pair in text.split("\0") if "=" in pair)
        except OSError:
            environ = None
        found.append(Server(int(folder.name), words, environ))
    return found


def local_url(host: str, port: int | str, secure: bool = False) -> str:
    """Returns the URL at which this machine reaches a server that listens on `host`."""
    every = not host.strip("0.:")  # each address of the machine
    host = "127.0.0.1" if every else f"[{host}]" if ":" in host else host
    return f"http{'s' * secure}://{host}:{port}"


def option(words: Sequence[str], name: str, default: str) -> str:
    """The value of the last flag of this name in `vllm serve`'s words."""
    found = default
    for place, word in enumerate(words):
        flag, given, value = word.partition("=")
        if flag.replace("_", "-") == name and (given or place + 1 < len(words)):
            found = value if given else words[place + 1]
    return found


def _configured(here: Machine, process: Path, words: Sequence[str]) -> list[str]:
    """The flags in the file that --config names, which those of the command outweigh."""
    name = option(words, "--config", "")
    try:
        text = (here.path(name) if name.startswith("/") else process / "cwd" / name).read_text() if name else ""
    except (OSError, UnicodeError):
        return []
    return [word for key, value in CONFIG.findall(text) for word in (f"--{key}", value.strip("\"'"))]


def _serves(words: Sequence[str]) -> bool:
    """The command is a server, not a program that has started one, such as `env` or a shell."""
    program = PurePath(words[0]).name
    if program == "vllm":
        return words[1:2] == ("serve",)
    if not program.startswith("python"):
        return False
    if "-m" in words and words[words.index("-m") + 1 :][:1] in [(name,) for name in SERVERS]:
        return True
    script = next((place for place, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
    return PurePath(words[script]).name == "vllm" and words[script + 1 : script + 2] == ("serve",)


def exposure(here: Machine) -> Iterator[Finding]:
    running = servers(here)
    for server in running:
        yield _judged(here, server)
    if not running:
        yield _unguarded(here, here.environ, "A server that starts in this shell") or ok(
            "No server runs here. This package's scripts listen on 127.0.0.1; plain `vllm serve` on all addresses."
        )


def _judged(here: Machine, server: Server) -> Finding:
    alone = server.socket or server.host.startswith("127.") or server.host in ("localhost", "::1")
    if server.keyed:
        weak = _unguarded(here, server.environ or {}, f"The server on {server.place}", keyed=True)
        if weak:
            return weak
    if alone:
        return ok(f"A server listens on {server.place}: this machine alone.")
    proxy = f"Let it listen on 127.0.0.1 behind a proxy that lets in the clients' routes alone: {PAGE}."
    if server.keyed:
        plain = "" if server.option("--ssl-certfile", "") else "It speaks no TLS, and "
        weak = f"{plain}vLLM {here.vllm} has known holes: not without a proxy"
        return warning(f"A server listens on {server.place} with a key. {weak}.", proxy)
    key = "asks for no key" if server.environ is not None else "whether it asks for a key is not to be seen"
    return warning(
        f"A server listens on {server.place}, and {key}: vLLM {here.vllm} has known holes.",
        f"Set VLLM_API_KEY in its environment. {proxy}",
    )


def _unguarded(here: Machine, environ: Mapping[str, str], who: str, keyed: bool = False) -> Finding | None:
    """The routes that a key leaves open; None where it protects all, or there is no key."""
    if not (keyed or environ.get("VLLM_API_KEY")):
        return None
    loaded = environ.get("VLLM_PLUGINS")
    if GUARD in envs.names(environ.get("NPU_GPTOSS_SKIP_PATCHES", "")):
        why = f"NPU_GPTOSS_SKIP_PATCHES leaves out the patch {GUARD}"
    elif loaded is not None and "npu_gptoss" not in loaded.split(","):
        why = "VLLM_PLUGINS leaves out npu_gptoss"
    else:
        return None
    remedy = f"Let it in again. {PAGE} lists the holes that it closes."
    starlette = here.version("starlette")
    if starlette and numbers(starlette) < STARLETTE_MENDED:
        hole = "a Host header passes by (CVE-2026-48746)"
        return failed(f"{who} has a key that {hole}: {why}, and starlette is {starlette}.", remedy)
    return warning(f"{who} has a key, which guards /v1 alone: {why}.", remedy)


def variables(here: Machine) -> Iterator[Finding]:
    wrong, misspelt = envs.unreadable(here.environ), envs.unknown(here.environ)
    for error in wrong:
        yield failed(str(error), "Give it such a value, or unset it: no server starts with this one.")
    for sentence in misspelt:
        yield warning(sentence, "Spell it as docs/configuration.md does, or unset it.")
    if not wrong and not misspelt:
        yield ok("No variable of this package is misspelt.")
