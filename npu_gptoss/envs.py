"""All environment variables of the package in one table, from which the documentation is generated.

`get(name)` parses the variable at each call, so tests and servers can change it after import.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from npu_gptoss.errors import InputError


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _switch(text: str) -> bool:
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ValueError("expected one of " + ", ".join(_SWITCH)) from None


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not 0 < int(text) <= 10**9:
        raise ValueError("expected a whole number from 1 to 1000000000")
    return int(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError("expected one of " + ", ".join(words))
        return text.strip().lower()

    return parse


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise ValueError("expected seconds from 0 to 3600")
    return seconds


@dataclass(frozen=True)
class Variable:
    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str


_FORMAT, _WEIGHTS = _one_of("auto", "nd", "nz"), _one_of("auto", "expanded", "packed")
_ROWS: tuple[tuple[str, Callable[[str], Any], Any, str], ...] = (
    ("NPU_GPTOSS", _switch, True, "0: stock vLLM, as if uninstalled; 1: on NVIDIA GPUs, never vLLM's own model"),
    ("NPU_GPTOSS_COMMIT", str, "", "the commit that `bench` writes into its records, where git cannot tell it"),
    ("NPU_GPTOSS_DISABLE_PLUGINS", _switch, False, "ignore third-party kernels (entry points `npu_gptoss.kernels`)"),
    ("NPU_GPTOSS_DRAIN_SECONDS", _seconds, 3.0, "how long a stopping server waits for requests in flight, up to 3600"),
    ("NPU_GPTOSS_DUMP", str, "", "a folder for each process's newest kernel calls, before they run: `verify --replay`"),
    ("ASCEND_EMULATOR", _switch, False, "set by `ascend-emulate`: this process runs on the emulated 910B"),
    ("ASCEND_EMULATOR_FP32", _switch, False, "on the emulated 910B: operators also take float32"),
    ("NPU_GPTOSS_ENGINE_RESTARTS", _count, 0, "times in 10 minutes that a dead engine is started anew; streams go on"),
    ("NPU_GPTOSS_EXPERT_FORMAT", _FORMAT, "auto", "on Ascend: the experts' weights in ND, FRACTAL_NZ, or the faster"),
    ("NPU_GPTOSS_EXPERT_WEIGHTS", _WEIGHTS, "auto", "MXFP4 experts: expanded at load, packed (a quarter), or auto"),
    ("NPU_GPTOSS_GRAMMAR_MIB", _count, 2048, "memory for checking one schema, regular expression or grammar, MiB"),
    ("NPU_GPTOSS_GRAMMAR_SECONDS", _count, 5, "time for checking a schema, an expression or a grammar; then refused"),
    ("NPU_GPTOSS_MAX_BODY_MIB", _count, 32, "largest body of a request, MiB; a larger one is answered 413"),
    ("NPU_GPTOSS_MAX_N", _count, 128, "most answers (`n`) that one request may ask for"),
    ("NPU_GPTOSS_MAX_PROMPTS", _count, 1024, "most sequences (prompts times `n`) in one /v1/completions request"),
    ("NPU_GPTOSS_OPEN_METRICS", _switch, False, "with an API key: /metrics needs none"),
    ("NPU_GPTOSS_PLATFORM", str, "", "select kernels as if on this platform: ascend, cuda or cpu"),
    ("NPU_GPTOSS_RESTART_WAIT_SECONDS", _seconds, 30.0, "how long a new request waits for a restart; then 503"),
    ("NPU_GPTOSS_SKIP_PATCHES", names, (), "names of runtime patches of vLLM to leave out, separated by commas"),
    ("NPU_GPTOSS_TILES", str, "", "on NVIDIA GPUs: a file of `npu-gptoss tune`, in the place of the package's tiles"),
    ("NPU_GPTOSS_TRACEBACK", _switch, False, "a server whose start fails shows its tracebacks"),
)
VARIABLES: dict[str, Variable] = {row[0]: Variable(*row) for row in _ROWS}

# NPU_GPTOSS_KERNEL_<FAMILY>_<MODE>=kernel or solution, one variable per operation: see kernels/selection.py
KERNEL_OVERRIDE_PREFIX = "NPU_GPTOSS_KERNEL_"
# known without torch; other packages' operations are not, so `unknown` looks at these families only
KERNEL_OPERATIONS = (
    *("ATTENTION_PAGED", "ATTENTION_WRITE_KV", "DENSE_ADD_NORM", "DENSE_GREEDY", "DENSE_LOGITS", "DENSE_OUTPUT"),
    *("DENSE_QKV", "DENSE_ROTATE_WRITE", "DENSE_ROUTER", "DENSE_TOKEN", "GRAPHS_ADVANCE", "MOE_EXPAND", "MOE_EXPERTS"),
    "MOE_ROUTE",
)


# Kubernetes sets these in each pod beside a service called npu-gptoss
_OF_A_SERVICE = re.compile(r"NPU_GPTOSS_(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")


def unknown(environ: Mapping[str, str]) -> list[str]:
    """Sentences for variables that look like this package's but that nothing reads."""
    sentences = []
    known = {*VARIABLES, *(f"{KERNEL_OVERRIDE_PREFIX}{operation}" for operation in KERNEL_OPERATIONS)}
    families = {operation.partition("_")[0] for operation in KERNEL_OPERATIONS}
    for name in sorted(environ):
        if not name.startswith("NPU_GPTOSS_") or name in known or _OF_A_SERVICE.fullmatch(name):
            continue
        family = name.removeprefix(KERNEL_OVERRIDE_PREFIX).partition("_")[0]
        near = difflib.get_close_matches(name, known, 1, 0.9)
        meant = f"; {near[0]} may be meant" if near else ""
        if not name.startswith(KERNEL_OVERRIDE_PREFIX):
            sentences.append(f"{ascii(name)[1:-1]} is no variable of npu-gptoss, so nothing reads it{meant}.")
        elif family in families or near:
            sentences.append(f"{ascii(name)[1:-1]} names no operation of npu-gptoss, so nothing reads it{meant}.")
        else:
            sentences.append(f"{ascii(name)[1:-1]} is read only if another package defines that operation.")
    return sentences


def get(name: str) -> Any:
    """The parsed value of a variable; its default if it is unset or empty. Raises InputError if it does not parse."""
    return _parsed(VARIABLES[name], os.environ.get(name, ""))


def unreadable(environ: Mapping[str, str]) -> list[InputError]:
    """The error of each variable whose value does not parse: some are read first hours after a server's start."""
    found = []
    for name, variable in VARIABLES.items():
        try:
            _parsed(variable, environ.get(name, ""))
        except InputError as error:
            found.append(error)
    return found


def _parsed(variable: Variable, text: str) -> Any:
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        wrong = f"{variable.name}={text!r} cannot be used: {error}. It means: {variable.meaning}."
        raise InputError(wrong, field=variable.name) from None
