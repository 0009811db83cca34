"""Ends a start that fails with the reason and what to do, in the process that the user started.

vLLM shows a traceback in each process that fails, the deepest first, and a process that only heard of the failure has
the last word. Here every process writes its traceback to one file, and the last line is the reason of the process that
failed first. Ours are the hooks of Python for an error that nothing catches, and the three log records with which vLLM
0.11 to 0.33 report a failed start; no function of vLLM is replaced.
"""

from __future__ import annotations

import argparse
import functools
import json
import linecache
import logging
import multiprocessing
import os
import re
import secrets
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from npu_gptoss import envs
from npu_gptoss.errors import InputError, short

FILE = "_GPTOSS_TRACEBACKS"  # names the file to the server's other processes; made by the first that fails
RUST = "VLLM_USE_RUST_FRONTEND"
_HEAD = "# "
_LONGEST = 600  # characters of a foreign reason
# Records of a failed start that carry its error: an engine's (vllm-ascend 0.23 has its own), a worker's, their parent's
_LOGGERS = ("vllm.v1.engine.core", "vllm.logger", "vllm.v1.executor.multiproc_executor", "vllm.v1.utils")
_RECORDS = ("failed to start", "while running API servers")

# What a foreign error's text contains, and what to do about it. The first that fits is told.
_LEAVE, _PATH = "Leave out the option that needs it, or install it", "Check the model's path or name"
_DOWNLOAD = "Download the model first (`hf download openai/gpt-oss-20b`), or give the path of a checkpoint"
_MEMORY = "Ask for less memory: a smaller --max-model-len, or another --gpu-memory-utilization"
_COUNTS = "Give --max-model-len, --max-num-seqs and --max-num-batched-tokens as numbers above 0"
_SIZES = "Give at least 1 to --tensor-parallel-size, --decode-context-parallel-size and --data-parallel-size"
_OBJECT = "Give an object in braces to each option that takes JSON, such as --speculative-config"
_PARSERS = "Use --tool-call-parser openai and leave out --reasoning-parser: gpt-oss has one form of calls and reasoning"
_YAML = "Give --config one YAML file with lines of the form `option: value`"
_PLUGINS = (
    "Unset VLLM_PLUGINS, or let it name npu_gptoss_cpu too (on an NPU ascend); `npu-gptoss doctor` says what lacks"
)
_CACHES = "VLLM_CACHE_ROOT, TORCHINDUCTOR_CACHE_DIR, XDG_CACHE_HOME and TMPDIR name other folders for caches"
_BUILDS = "Take an image (docs/installation.md), or builds made for each other: `npu-gptoss doctor` names them"
_SOURCE = "`source` the set_env.sh of CANN and NNAL before the start; a container needs the driver's lib64 too"
_PORTS = (
    "Give each server its own cards (ASCEND_RT_VISIBLE_DEVICES) and ports, such as "
    "HCCL_HOST_SOCKET_PORT_RANGE=60100-60150 HCCL_NPU_SOCKET_PORT_RANGE=61100-61150"
)
_RANKS = "Look for the first error in the other ranks' logs; on an NPU HCCL_CONNECT_TIMEOUT=900 waits longer"
_THREADS = "Raise `ulimit -u` (a container's --pids-limit); OMP_NUM_THREADS=1 asks for fewer threads"
_CARD = "`npu-smi info` shows the card's health, docs/troubleshooting.md what the code means"
_DRIVER = "Look at `nvidia-smi`: the driver is too old, or the container was started without --gpus all"
_GGUF = "Take the model's safetensors, in MXFP4 or BF16"
REMEDIES = (
    (r"vllm_ascend_C|GLIBC|undefined symbol|camem allocator", _BUILDS),
    (r"No module named '(tbe|acl)\b|lib(ascend|hccl|atb|ge_|op|nnop|reg|runtime)\w*\.so\S* cannot open", _SOURCE),
    (r"(/\S+): cannot allocate memory in static TLS block", r"Set LD_PRELOAD=\1"),
    (
        r"cannot import name '\w+' from '?vllm",
        "Leave out the option whose class imports it, as --kv-transfer-config does: it is of another release of vLLM",
    ),
    (r"No module named '?([\w-]+\.[\w.-]+)", r"Leave out the option that names \1, or name a module that is installed"),
    (r"No module named '?([\w.-]+)", r"Install the package \1, or leave out the option that needs it"),
    (r"requires? (\w+_for_pytorch|the package)|[Pp]lease install|pip install|packages are installed", _LEAVE),
    (r"offline|LocalEntryNotFound|cached snapshot|couldn't connect|resolve host|Max retries", _DOWNLOAD),
    (r"Repo id must|repository ID|valid model identifier|appear to have", _PATH),
    (r"Failed to bind the IP port", _PORTS),
    (r"Getting socket times out|waiting for clients", _RANKS),
    (r"error code(:| is) ?507\d{3}|Driver module", _CARD),
    (r"libcuda\.so|NVIDIA driver|driver version is insuff|No CUDA GPUs", _DRIVER),
    (r"NCCL error|nccl\w*Error", "Set NCCL_DEBUG=INFO and read NCCL's first warning; a container needs --ipc host"),
    (r"no kernel image", "Install a torch and a vLLM whose CUDA knows this card"),
    (r"uid not found", "Add the user to /etc/passwd, where HCCL looks too, or set USER"),
    (r"Too many open files", "Raise `ulimit -n` (a container's --ulimit nofile) to 65536"),
    (r"start new thread|Resource temporarily unavailable", _THREADS),
    (r"World size \(\d+\) is larger", "Use a smaller --tensor-parallel-size, or let the server see more cards"),
    (r"Stale file handle|Input/output error", "Look at the disk, or the network's file system, that holds it"),
    (r"\(shm\)|/dev/shm|'/psm_|(code|code:|':) -7\b", "Start the container with --shm-size 16g or --ipc host"),
    (r"(?i:address) already in use", "Stop the other server, or choose another --port"),
    (r"infer device type", _PLUGINS),
    (r"greater than the derived max_model_len", "Use a --max-model-len of at most the derived one"),
    (r"sliding window", "Leave out --disable-sliding-window"),
    (r"not supported for quantization method", "Use --dtype bfloat16"),
    (r"[Qq]uantization (method|is currently)", "Leave out --quantization: the checkpoint's own format is served"),
    (r"max_num_batched_tokens \(-|max_num_batched_tokens \(0|negative dimension", _COUNTS),
    (r"max_num_batched_tokens \(\d", "Use a larger --max-num-batched-tokens or a smaller --max-num-seqs"),
    (r"modulo by zero|data_parallel_rank \(0", _SIZES),
    (r"'(int|float)' object has no attribute|must be a mapping", _OBJECT),
    (r"died (unexpectedly|with exit code)", "Read its last log lines; if it has none, memory may have run out"),
    (r"(?i)(reasoning|tool[ -]call)[ -]parser", _PARSERS),
    (r"values to unpack", "Give an option that names a class its module too, as in `package.module.Class`"),
    (r"as a positional argument", "Name the model right behind `vllm serve`, without --model"),
    (r"object has no attribute 'items'|while (parsing|scanning)|[Cc]onfig file", _YAML),
    (r"divisible by tensor parallel", "Use a --tensor-parallel-size that divides it"),
    (r"V0 engine|VLLM_USE_V1", "Leave out what only vLLM's V0 engine has (VLLM_USE_V1=0, --max-num-partial-prefills)"),
    (r"swap space", "Use a smaller --swap-space"),
    (r"GGUF|gguf", _GGUF),
    (r"FP8 KV cache", "Leave out --kv-cache-dtype: the cache has the model's dtype"),
    (r"No space left|[Qq]uota exceeded", f"Make room there. {_CACHES}"),
    (r"Read-only file system", _CACHES),
    (r"Permission denied", f"Let this user read and write it. {_CACHES}"),
    (r"[Ii]nvalid request on line", "Correct or leave out that line of --input-file"),
    (r"[Cc]onnection (closed|reset) by peer", "Look at the logs of the other ranks and nodes: one of them ended first"),
    (
        r"Free memory|larger than the (available|maximum)|cache blocks|KV cache|out of memory|allocate memory|: -9\b",
        _MEMORY,
    ),
)
REMEDY = "Correct or leave out the option or variable that it is about; `npu-gptoss doctor` checks the installation"
_process: int | None = None  # in which the hooks are installed


def command() -> str:
    """Returns the command of vLLM's that the user started with this process; empty for a program that uses vLLM."""
    if Path(sys.argv[0]).name == "api_server.py":
        return "vllm serve"
    return f"vllm {sys.argv[1]}" if sys.argv[1:2] in (["serve"], ["run-batch"]) else ""


def serves() -> bool:
    return command() == "vllm serve"


def serves_in_rust() -> bool:
    """Returns whether another program of vLLM's will answer requests, in place of Python's server."""
    from vllm import envs

    return serves() and getattr(envs, RUST, False)  # 0.11 has no such variable


def install() -> None:
    """Installs the hooks of this process of `vllm serve` or `run-batch`; called in each. A second call does nothing."""
    global _process
    if _process == os.getpid():
        return
    if multiprocessing.parent_process() is None and command():
        name = f"npu-gptoss-{os.getpid()}-{secrets.token_hex(4)}.txt"
        os.environ[FILE] = str(Path(tempfile.gettempdir()) / name)
        sys.excepthook = _end
        argparse.ArgumentParser.error = functools.partialmethod(_usage, argparse.ArgumentParser.error)
        # the tracker of shared memory, a process of its own, would have the last word about what it cleans up
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        util.register_after_fork(sys.modules[__name__], lambda _: install())  # a forked process loads no plugin again
    elif multiprocessing.parent_process() is None or FILE not in os.environ:
        return
    else:
        util.Finalize(None, _end_child, exitpriority=-1)
    _process = os.getpid()
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _not_its_traceback not in logger.filters:
            logger.addFilter(_not_its_traceback)


def _not_its_traceback(record: logging.LogRecord) -> bool:
    if not record.exc_info or not any(words in str(record.msg) for words in _RECORDS):
        return True
    return not _written(record.exc_info[1]) or envs.get("NPU_GPTOSS_TRACEBACK")


def _end_child() -> None:
    """Runs when a process of multiprocessing ends; its error, if any, is the one being handled."""
    error = sys.exc_info()[1]
    if isinstance(error, Exception) and _written(error) and not envs.get("NPU_GPTOSS_TRACEBACK"):
        raise SystemExit(1)  # in its place: multiprocessing prints no traceback of it


def _written(error: BaseException) -> bool:
    """Appends the reason and the traceback to the file; False if the folder takes none."""
    lines = [_HEAD + json.dumps(sentence(error)) + "\n", f"{multiprocessing.current_process().name}:\n"]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(os.environ[FILE], flags, 0o600), "w") as file:
            file.write("".join([*lines, *traceback.format_exception(error)]))
    except OSError:
        return False
    return True


def _first() -> str | None:
    """Returns the reason of the process that failed first."""
    try:
        lines = Path(os.environ[FILE]).read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith(_HEAD)).removeprefix(_HEAD))
    except (KeyError, OSError, StopIteration):
        return None


def _usage(parser: argparse.ArgumentParser, original: Callable[..., NoReturn], message: str) -> NoReturn:
    """Ends at a wrong flag as Python does, without pydantic's address behind the reason."""
    original(parser, " ".join(line.strip() for line in message.splitlines() if "errors.pydantic.dev" not in line))


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, Exception):  # Ctrl-C
        sys.__excepthook__(kind, error, trace)
        return
    first = _first()
    if first or not _ours(error):
        if envs.get("NPU_GPTOSS_TRACEBACK") or not _written(error):
            sys.__excepthook__(kind, error, trace)
        else:
            print(_where(), file=sys.stderr)
    print(f"{command()}: {first or sentence(error)}", file=sys.stderr, flush=True)


def _where() -> str:
    return f"The traceback is in {os.environ[FILE]}; NPU_GPTOSS_TRACEBACK=1 shows it here."


def last_words(otherwise: str) -> str:
    """Returns the end of a server's log where vLLM sees no failure. otherwise: if no process has told its reason."""
    first = _first()
    return f"{_where()}\nvllm serve: {first}" if first else f"vllm serve: {otherwise}"


def causes(error: BaseException) -> list[object]:
    """Returns the errors that pydantic has wrapped, in its words where it has only these."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return []
    return [entry.get("ctx", {}).get("error") or _named(entry) for entry in errors()]


def _words(error: object) -> str:
    """The text of an error; of a bare assertion its source."""
    arguments = getattr(error, "args", ())
    arguments = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], tuple) else arguments
    if len(arguments) > 1 and isinstance(arguments[0], str) and arguments[0].count("%s") == len(arguments) - 1:
        return arguments[0] % arguments[1:]
    trace = getattr(error, "__traceback__", None)
    if not str(error) and trace:
        frame = traceback.extract_tb(trace)[-1]
        return linecache.getline(frame.filename, frame.lineno).strip()
    return str(error)


def _named(entry: dict[str, Any]) -> str:
    """pydantic's words for a field's value, with the field."""
    field = next(iter(entry.get("loc", ())), None)
    return entry["msg"] if field is None else f"{field}: {entry['msg']}"


def _ours(error: BaseException) -> bool:
    return isinstance(error, InputError) or any(isinstance(one, InputError) for one in causes(error))


def _about(error: BaseException, text: str) -> str:
    """The variables or paths that an error of Python's does not name, as of `int("x")` or a socket without a folder."""
    names: list[str] = []
    if found := re.search(r"(?:invalid literal for int|could not convert string to float).*: '(.*)'$", text):
        names = [name for name, value in os.environ.items() if value == found[1]]
    elif isinstance(error, FileNotFoundError) and not error.filename:
        paths = (word.rpartition("=")[2] for word in sys.argv)
        names = [path for path in paths if path.startswith("/") and not os.access(path, os.F_OK)]
    return "".join(f"{short(name)}: " for name in names)


def sentence(error: BaseException) -> str:
    """Returns why a start failed, and what to do."""
    inner = dict.fromkeys(map(_words, causes(error)))
    if isinstance(error, InputError) or _ours(error):
        return " ".join(inner) if inner else str(error)
    text = " ".join((" ".join(inner) or _words(error)).split())
    if not inner and not isinstance(error, (RuntimeError, ValueError, OSError)):
        text = f"{type(error).__name__}: {text}"
    text = re.sub(r" ?(Original error: )?Traceback \(most recent call last\).*", "", text)
    text = re.sub(r" ?Please (raise|open|file|report) [^.]*\.?", "", text)
    found = ((re.search(pattern, text), remedy) for pattern, remedy in REMEDIES)
    remedy = next((match.expand(remedy) for match, remedy in found if match), REMEDY)
    return f"{_about(error, text)}{short(text, _LONGEST).rstrip('.!')}. {remedy}."
