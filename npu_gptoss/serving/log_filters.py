"""Filters of vLLM's log: false alarms at every start of gpt-oss, secrets, and tracebacks of what is no failure.

Two more false alarms are prevented elsewhere: `platform.py` (no `vllm._C`), `plugin.py` (a model registered already).
"""

from __future__ import annotations

import logging
import resource
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from npu_gptoss.errors import short

MANY_FILES = 4096  # open files; each client takes one
WANTED_FILES = 65535  # vLLM asks for this many
SECRET = ("api_key", "hf_token")
STOPPING = "ServerStoppingError"  # of `compat/server/shutdown.py`; the log has told the end already

Change = Callable[[logging.LogRecord], bool]  # may change the record; False drops it


def drop(_: logging.LogRecord) -> bool:
    return False


def without_secrets(record: logging.LogRecord) -> bool:
    """Hides the keys among the arguments that vLLM logs at start: a dict's, or those of `run-batch`, a Namespace's."""
    if isinstance(record.args, dict):
        record.args = _hidden(record.args)
    elif record.args and isinstance(record.args[0], Namespace):
        record.args = (Namespace(**_hidden(vars(record.args[0]))),)
    return True


def _hidden(given: dict[str, Any]) -> dict[str, Any]:
    return given | {name: "***" for name in SECRET if given.get(name) is not None}


def in_one_line(record: logging.LogRecord) -> bool:
    """Logs a client's mistake as a single line. A TypeError or RuntimeError keeps its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ValueError):
        record.msg, record.args, record.exc_info = "A request was refused: %s", (short(str(error), 400),), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def unless_stopping(record: logging.LogRecord) -> bool:
    """Drops the traceback of each stream that the server's end has cut."""
    return not (record.exc_info and type(record.exc_info[1]).__name__ == STOPPING)


def unless_of_an_answer(record: logging.LogRecord) -> bool:
    """Drops the warning for each answer of vLLM 0.11's `run-batch`, whose classes lack two of our fields."""
    return not (record.args and set(record.args[0]) <= {"reasoning", "completion_tokens_details"})


_API = "vllm.entrypoints.openai"
# (loggers, beginning of the unformatted message, change)
FILTERS: tuple[tuple[str, str, Change], ...] = (
    ("vllm.platforms.cpu", "Pin memory is not supported on CPU", drop),  # pinned memory is for copies to a device
    ("vllm.v1.cudagraph_dispatcher", "cudagraph dispatching keys are not ", drop),  # a CPU has no graphs
    ("transformers.configuration_utils", "`torch_dtype` is deprecated!", drop),  # vLLM 0.11 reads it, not the user
    (f"{_API}.serving_responses {_API}.responses.serving", "For gpt-oss, we ignore --enable-auto-tool-choice", drop),
    ("vllm.utils vllm.utils.system_utils", "Found ulimit of ", drop),  # `open_more_files` has raised it
    ("vllm.entrypoints.utils vllm.entrypoints.serve.utils.api_utils", "non-default args: ", without_secrets),
    ("vllm.entrypoints.cli.run_batch", "args: ", without_secrets),
    (f"{_API}.serving_completion {_API}.serving_tokenization", "Error in preprocessing prompt inputs", in_one_line),
    (f"{_API}.protocol", "The following fields were present in the request", unless_of_an_answer),
    (f"{_API}.serving_completion {_API}.completion.serving", "", unless_stopping),
)


class Filter(logging.Filter):
    """Applies a change to the messages with this beginning."""

    def __init__(self, beginning: str, change: Change) -> None:
        super().__init__()
        self.beginning, self.change = beginning, change

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginning) or self.change(record)


def install() -> None:
    """Called in each process of vLLM. With fewer than MANY_FILES open files the warning about them stays."""
    enough = open_more_files() >= MANY_FILES
    for names, beginning, change in FILTERS:
        for logger in map(logging.getLogger, names.split()):
            known = [each.change for each in logger.filters if isinstance(each, Filter) and each.beginning == beginning]
            if change not in known and (enough or not beginning.startswith("Found ulimit")):
                logger.addFilter(Filter(beginning, change))


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
