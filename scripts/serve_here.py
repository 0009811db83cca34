"""Serve a gpt-oss checkpoint with stock `vllm serve`, on the CPU or an NVIDIA GPU: the server of `make serve`.

Without a checkpoint it serves the trained tiny one, made on first use. It sets the few environment variables and flags
that the place wants (each can be overridden), starts the server in its own process group, waits for `/health`, prints
the URL and a request that works, and on Ctrl-C stops everything it started.

Inside `npu-gptoss emulate` the same script serves on the emulated Ascend 910B: `make serve-emulated`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from npu_gptoss import envs
from npu_gptoss.doctor.exposure import local_url, option
from npu_gptoss.errors import InputError
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, build_vocabulary, find_vocabulary

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / ".checkpoints" / "gpt-oss-tiny"
TINY_NAME = "gpt-oss-tiny"
TINY_QUESTION = "What is 3 + 4?"
OWN_QUESTION = "What does an attention sink do? One sentence."
PLACES = {"cpu": "", "cuda": " on the NVIDIA GPU"}  # in words
# what tells, in the log of a server, which kernels compute: npu_gptoss/serving/cuda/model.py
OURS = re.compile(r"npu-gptoss computes .+")
# set by `npu-gptoss emulate` for all that it runs
EMULATED = os.environ.get("ASCEND_EMULATOR") == "1"
TARGET = "serve-emulated" if EMULATED else "serve"
# a graph is captured for each batch size: few sizes, a quick start
EMULATED_FLAGS = ("--max-num-seqs", "16")
# the server is on this machine: no proxy of the user's is asked for it, and its certificate has another name
_UNCHECKED = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _UNCHECKED)
PATIENCE = 12  # seconds that the server gets to stop when the requests in flight are done or ended


# how the server ends a log by itself: npu_gptoss/serving/compat/server/shutdown.py
LAST_WORD = re.compile(r"(?:npu-gptoss: (?=the engine died)|(?:^|\) )vllm serve: )(.+)")


class ServeError(InputError):
    """The server does not start; the sentence says why, in front of the end of its log."""

    layout = "\n"


def tiny_checkpoint(directory: Path = TINY) -> Path:
    """The trained tiny checkpoint; written anew when it is missing, incomplete, or its sources have changed.

    Another process that wants it meanwhile waits: `make serve` and `make serve-emulated` may be started together.
    """
    package = ROOT / "npu_gptoss"
    sources = sorted([*package.glob("assets/*"), *package.glob("model/*.py")])
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources if path.is_file())).hexdigest()
    stamp = directory / ".made-from"
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == digest and any(directory.glob("*.safetensors")):
            return directory
        shutil.rmtree(directory, ignore_errors=True)
        print(f"checkpoint: the trained tiny gpt-oss is written to {directory} …", flush=True)
        command = [sys.executable, "-m", "npu_gptoss.cli", "tiny", str(directory), "--trained"]
        if subprocess.run(command, check=False).returncode:
            raise ServeError("the tiny checkpoint could not be written; the reason is above.")
        stamp.write_text(digest)
        return directory
    finally:
        os.close(lock)


def served_name(model: Path) -> str:
    """The folder's name; the model's where the folder lies in the hub's cache, which names it by a hash."""
    return model.parents[1].name.rpartition("--")[2] if model.parent.name == "snapshots" else model.name


def own_checkpoint(name: str) -> Path:
    """The user's checkpoint directory; raises InputError when there is nothing of gpt-oss that vLLM could load."""
    try:
        directory = Path(name).expanduser().resolve()
        found = directory.is_dir()
    except (OSError, RuntimeError) as error:  # links in a circle, names that are too long, ~nobody
        raise ServeError(f"MODEL={name} cannot be looked at: {error}. Check the path.") from None
    if not found:
        raise ServeError(
            f"MODEL={name} is not a directory. "
            "Expected a downloaded checkpoint: config.json, tokenizer.json and *.safetensors."
        )
    from npu_gptoss.model.check import check_directory  # needs torch, which the tiny checkpoint does not

    check_directory(directory)
    return directory


def ensure_vocabulary(model: Path) -> Path:
    """The folder with the harmony vocabulary; rebuilt from the checkpoint's tokenizer when it is nowhere yet."""
    found = find_vocabulary(model)
    if found is None:
        print("vocabulary: rebuilt from the checkpoint's tokenizer.json …", flush=True)
        found = build_vocabulary(model).parent
    return found


def check_port(host: str, given: str) -> int:
    """The port as a number. Raises ServeError unless the server could listen there."""
    port = int(given) if re.fullmatch("[0-9]{1,5}", given) else 0
    if not 0 < port < 65536:
        raise ServeError(f"PORT={given} is not a number between 1 and 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        remedy = (
            f"Choose another port: make {TARGET} PORT={port + 1}" if error.errno == errno.EADDRINUSE else "Check HOST."
        )
        raise ServeError(f"the server cannot listen on {host} port {port}: {error.strerror}. {remedy}") from None
    return port


def serving_environment(
    model: Path, vocabulary: Path, base: Mapping[str, str] = os.environ, on: str = "cpu"
) -> dict[str, str]:
    """`base` plus the variables for serving there (on: of PLACES); the user's own stay."""
    own = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", BASE_VARIABLE: str(vocabulary)}
    if on == "cuda":
        # vLLM would look for FlashInfer, which its environment lacks; its own sampler does the same
        return {**own, "VLLM_USE_FLASHINFER_SAMPLER": "0", **base}
    tiny = model == TINY
    return {
        # The tiny model gains nothing from a second thread, and several busy OpenMP processes starve each other.
        "OMP_NUM_THREADS": "1" if tiny else str(len(os.sched_getaffinity(0))),
        "VLLM_CPU_KVCACHE_SPACE": "1" if tiny else "4",  # GiB
        "NPU_GPTOSS_PLATFORM": "cpu",  # also where an accelerator is; on the emulated 910B it is not read
        **own,
        **base,
    }


def serve_command(
    model: Path,
    name: str,
    host: str,
    port: int,
    extra: Sequence[str],
    on: str = "cpu",
    python: Path = Path(sys.executable),
) -> list[str]:
    """The stock command of that Python's vLLM. `extra` comes last, so that a user's flag overrides ours.

    A vLLM on PYTHONPATH, or installed elsewhere than its Python, has no script there; its module does the same.
    """
    script = python.parent / "vllm"
    return [
        *([str(script)] if script.is_file() else [str(python), "-m", "vllm.entrypoints.cli.main"]),
        *("serve", str(model), "--served-model-name", name, "--host", host, "--port", str(port)),
        *(("--max-model-len", "8192") if on == "cpu" else ()),  # a GPU has the memory for the checkpoint's own
        *("--enable-auto-tool-choice", "--tool-call-parser", "openai"),
        *extra,
    ]


def words(flags: str) -> list[str]:
    """The flags of one text, in a shell's quotes, of which nothing is run."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ServeError(f"ARGS={flags} cannot be read as flags: {str(error).lower()}.") from None


def masked(command: Sequence[str]) -> list[str]:
    """The command as it may be shown: `***` in the place of every key and token."""
    shown, secret = [], False
    for word in command:
        flag = re.match(r"--(?:api[-_]k|hf[-_]t)\w*(=)?", word)
        secret = (flag is not None and not flag[1]) or (secret and not word.startswith("-"))
        shown.append(f"{word.partition('=')[0]}=***" if flag and flag[1] else "***" if secret and not flag else word)
    return shown


def exposure(host: str, flags: Sequence[str], key: str) -> list[str]:
    """Warnings about an address that others reach and about a key in a command; as in lib.sh.

    flags: of `vllm serve`, where a --host wins. key: VLLM_API_KEY.
    """
    told = []
    in_container = "container" in os.environ or Path("/.dockerenv").exists()
    host = option(flags, "--host", host)
    if masked(flags) != list(flags):
        told.append("everybody on this machine can read a key in a command (ps); set VLLM_API_KEY instead.")
    if not (host.startswith("127.") or host in ("localhost", "::1") or key or told):
        reached = "the published port" if in_container else host
        told.append(f"whoever reaches {reached} can use the server: it asks for no key, and vLLM has known holes.")
        instead = "publish the port on 127.0.0.1" if in_container else "leave HOST out"
        told.append(f"Set VLLM_API_KEY and put a proxy before it (docs/exposing-the-server.md), or {instead}.")
    return told


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the server in a new process group, with its output in `log`, which it locks.

    Raises ServeError when the log cannot be written, or belongs to another server.
    """
    try:
        file = log.open("ab")
    except OSError as error:
        raise ServeError(
            f"the server's log {log} cannot be written: {error.strerror}. Mend that, or name another file with --log."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the server inherits the lock with the file
        except BlockingIOError:
            raise ServeError(f"another server writes {log}. End that one, or choose another port.") from None
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        return subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes], patience: float | None = None) -> None:
    """Asks the server to stop; after `patience` seconds kills the rest of its group. A second call does no harm."""
    if patience is None:
        patience = envs.get("NPU_GPTOSS_DRAIN_SECONDS") + PATIENCE
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # a script's background commands ignore SIGINT, and so would their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    finally:  # also when a second Ctrl-C ends the waiting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path, lines: int = 0) -> list[str]:
    """The last lines that say something, all by default, without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    return [line for line in plain.splitlines() if line.strip()][-lines:]


def likely_reason(log: Path) -> str:
    """The server's own last word, else the first error in the log, preferably one of this package.

    The last error is mostly 'see above'.
    """
    for line in reversed(tail(log)):
        if last := LAST_WORD.search(line):
            return last[1]
    told = [line for line in tail(log) if not re.search(r"(?:^|\) )(?:INFO|WARNING) ", line)]
    errors = [found for line in told if (found := re.search(r"([\w.]*)(?:Error: |Value error, )(.+)", line))]
    own = [error for error in errors if "npu-gptoss" in error[2] or error[1].startswith("npu_gptoss.")]
    return next((error[2] for error in (*own, *errors)), "")


def ours(log: Path) -> list[str]:
    """The log's lines on our kernels, each once: every rank prints them."""
    return sorted({found[0] for line in tail(log) if (found := OURS.search(line))})


def wait_until_ready(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    timeout: float | None = None,
    progress: Callable[[float], None] = lambda seconds: None,
) -> float:
    """Polls `url`/health until it answers; returns the seconds it took.

    Raises ServeError with the end of the log when the server ends before that or `timeout` seconds pass.
    """
    begin = time.monotonic()
    while True:
        seconds = time.monotonic() - begin
        if process.poll() is not None:
            problem = f"ended with exit code {process.returncode} before it was ready"
        elif timeout is not None and seconds > timeout:
            problem = f"was not ready after {timeout:.0f} s"
        else:
            try:
                with DIRECT.open(f"{url}/health", timeout=5):
                    return seconds
            except (urllib.error.URLError, OSError):
                progress(seconds)
                time.sleep(0.5)
                continue
        end = "\n".join("    " + line for line in tail(log, 25))
        reason = likely_reason(log)
        probably = f"\nProbably because: {reason}" if reason else ""
        raise ServeError(f"vllm serve {problem}. The end of its log, {log}:\n{end}{probably}")


def show_progress(log: Path) -> Callable[[float], None]:
    """A line every 15 seconds, on a terminal a counter."""
    shown = 0.0

    def show(seconds: float) -> None:
        nonlocal shown
        if sys.stdout.isatty():
            print(f"\rvllm serve: starting … {seconds:.0f} s", end="", flush=True)
        elif seconds - shown >= 15:
            shown = seconds
            print(f"  … {seconds:.0f} s: {(tail(log, 1) or ['no output yet'])[-1][:100]}", flush=True)

    return show


def log_of(port: int) -> Path:
    """Returns the log of the server on this port: two servers of one checkout do not share a log."""
    return ROOT / f"{TARGET}-{port}.log"


def example_request(url: str, name: str, question: str, keyed: bool = False) -> str:
    """keyed: the server asks for a key; the request takes it from the environment, so that it is shown nowhere."""
    key = """ -H "Authorization: Bearer $VLLM_API_KEY\"""" if keyed else ""
    body = {"model": name, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    curl = "curl -sk" if url.startswith("https") else "curl -s"
    json_ = f"-H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    return f"{curl} {url}/v1/chat/completions {json_}"


def invitation(seconds: float, url: str, name: str, keyed: bool) -> str:
    """The text of a server that is ready, with a request to try."""
    request = example_request(url, name, TINY_QUESTION if name == TINY_NAME else OWN_QUESTION, keyed)
    where = f"{name} at {url}/v1 (any OpenAI client)"
    return f"\nready after {seconds:.0f} s: {where}. Try, in another terminal:\n\n  {request}\n"


def invite_when_ready(pid: str, host: str, port: str, name: str, keyed: str) -> None:
    """Waits until the server with this process answers, or has ended: the last part of serve.sh."""
    url, begin, state = local_url(host, int(port)), time.monotonic(), Path(f"/proc/{pid}/stat")
    with contextlib.suppress(FileNotFoundError):
        while state.read_text().rpartition(")")[2].split()[0] != "Z":  # which has ended and waits for its parent
            try:
                with DIRECT.open(f"{url}/health", timeout=5):
                    print(invitation(time.monotonic() - begin, url, name, bool(keyed)))
                    return
            except OSError:
                time.sleep(1)


def run(options: argparse.Namespace) -> int:
    flags = [*(EMULATED_FLAGS if EMULATED else ()), *words(options.flags), *options.vllm]
    if option(flags, "--uds", ""):
        raise ServeError("--uds: make waits for the server at a port. Leave it out, or start `vllm serve` yourself.")
    host = option(flags, "--host", options.host)
    port = check_port(host, option(flags, "--port", options.port))
    envs.get("NPU_GPTOSS_DRAIN_SECONDS")
    model = own_checkpoint(options.model) if options.model else tiny_checkpoint()
    name = served_name(model) if options.model else TINY_NAME
    environment = serving_environment(model, ensure_vocabulary(model), on=options.on)
    command = serve_command(model, name, host, port, flags, options.on)
    name = option(flags, "--served-model-name", name)
    log = Path(options.log) if options.log else log_of(port)
    url = local_url(host, port, secure=bool(option(flags, "--ssl-certfile", "")))
    key = environment.get("VLLM_API_KEY", "")
    keyed = bool(key) or any(re.match("--api[-_]k", flag) for flag in flags)
    for sentence in exposure(host, flags, key):
        print(f"make {TARGET}: {sentence}", file=sys.stderr, flush=True)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    where = " on the emulated Ascend 910B" if EMULATED else PLACES[options.on]
    print(f"vllm serve: starting{where}, its output goes to {log}\n  {shlex.join(masked(command))}", flush=True)
    process = start(command, environment, log)
    try:
        seconds = wait_until_ready(process, url, log, progress=show_progress(log))
        print("".join(f"\n{sentence}" for sentence in ours(log)), end="")
        print(invitation(seconds, url, name, keyed), "Ctrl-C stops the server.", sep="\n", flush=True)
        code = process.wait()
        reason = likely_reason(log)
        raise ServeError(
            f"vllm serve ended with exit code {code}; its log is {log}"
            + (f"\nProbably because: {reason}" if reason else "")
        )
    except KeyboardInterrupt:
        print("\nstopping …", flush=True)
        return 0
    finally:
        stop(process)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="directory of a checkpoint; without it the trained tiny one")
    parser.add_argument("--on", choices=PLACES, default="cpu", help="where: what this Python's vLLM is built for")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8000")
    parser.add_argument("--log", default="", help="file for the server's output; by default one for each port")
    parser.add_argument(
        "--flags", default="", help="flags for `vllm serve` as one text with a shell's quotes: make's ARGS"
    )
    parser.add_argument("vllm", nargs="*", metavar="-- FLAG", help="further flags for `vllm serve`")
    try:
        return run(parser.parse_args(arguments))
    except InputError as error:
        print(f"\nmake {TARGET}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the server was started; after that, Ctrl-C is how to stop it
        print(f"\nmake {TARGET}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
