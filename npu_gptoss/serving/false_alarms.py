"""Filters for warnings that vLLM prints at every start of gpt-oss and that need no action.

Two more are prevented elsewhere: `platform.py` (no `vllm._C`), `plugin.py` (a model registered already).
"""

from __future__ import annotations

import logging
import resource

MANY_FILES = 4096  # open files; each client takes one
WANTED_FILES = 65535  # vLLM asks for this many

# (logger, beginning of the unformatted message, reason to hide it)
FALSE_ALARMS = (
    ("vllm.platforms.cpu", "Pin memory is not supported on CPU", "pinned memory is for copies to a device"),
    ("vllm.v1.cudagraph_dispatcher", "cudagraph dispatching keys are not ", "a CPU has no graphs"),
    ("transformers.configuration_utils", "`torch_dtype` is deprecated!", "vLLM 0.11 reads it, not the user"),
    ("vllm.entrypoints.openai.serving_responses", "For gpt-oss, we ignore --enable-auto-tool-choice", "always on"),
    ("vllm.entrypoints.openai.responses.serving", "For gpt-oss, we ignore --enable-auto-tool-choice", "always on"),
    ("vllm.utils", "Found ulimit of ", "`open_more_files` has raised it as far as it goes"),
    ("vllm.utils.system_utils", "Found ulimit of ", "`open_more_files` has raised it as far as it goes"),
)


def silence() -> None:
    """Installs the filters; called in each process of vLLM. With fewer than MANY_FILES open files the warning stays."""
    enough = open_more_files() >= MANY_FILES
    for name, beginning, _ in FALSE_ALARMS:
        logger = logging.getLogger(name)
        if beginning.startswith("Found ulimit") and not enough:
            continue
        if not any(isinstance(known, Without) and known.beginning == beginning for known in logger.filters):
            logger.addFilter(Without(beginning))


class Without(logging.Filter):
    """Drops messages with this beginning."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self.beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning)


def open_more_files() -> int:
    """Raises this process's limit of open files to the allowed maximum and returns it.

    vLLM does not raise it if the machine allows fewer files than vLLM asks for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
