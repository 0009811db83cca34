"""The log has no warning that asks nothing of the user, no key, and no traceback of what is no failure."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import resource
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from npu_gptoss.serving import log_filters
from npu_gptoss.serving.compat.server.shutdown import stopping_error

pytestmark = pytest.mark.serving


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(1024, 20000, 20000), (1024, 100000, 65535), (1024, resource.RLIM_INFINITY, 65535)]
)
def test_fewer_open_files_than_the_machine_allows(soft, hard, raised, monkeypatch) -> None:
    wanted = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    assert log_filters.open_more_files() == raised
    assert wanted == [(raised, hard)]


@pytest.mark.parametrize(("most", "warned"), [(1024, True), (20000, False)])
def test_few_open_files_are_still_warned_of(most: int, warned: bool, monkeypatch) -> None:
    logger = logging.getLogger(f"npu_gptoss.test.{most}")
    monkeypatch.setattr(log_filters, "FILTERS", [(logger.name, "Found ulimit of ", log_filters.drop)])
    monkeypatch.setattr(log_filters, "open_more_files", lambda: most)
    for _ in range(2):
        log_filters.install()
    assert bool(logger.filter(logging.makeLogRecord({"msg": "Found ulimit of %s and failed"}))) is warned
    assert logger.filter(logging.makeLogRecord({"msg": "another"}))
    assert len(logger.filters) == (0 if warned else 1)


def test_filtered_message_is_not_one_that_this_vllm_prints() -> None:
    """A message that a release words otherwise would be printed again; a logger of another release has no module."""
    found = 0
    for name, beginning in ((name, beginning) for names, beginning, _ in log_filters.FILTERS for name in names.split()):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if spec is not None and beginning and beginning in Path(spec.origin).read_text():
            found += 1
    assert found >= 7


def written(name: str, level: int, text: str, *values: Any, error: BaseException | None = None) -> str | None:
    """Returns the line that vLLM's logger of this name writes, with `traceback` behind it; None if it writes none."""
    log_filters.install()
    logger = logging.getLogger(name)
    record = logger.makeRecord(name, level, "", 0, text, values, error and (type(error), error, None))
    if not logger.filter(record):
        return None
    return f"{record.levelname} {record.getMessage()}{' traceback' if record.exc_info else ''}"


@pytest.mark.parametrize("module", ["vllm.entrypoints.utils", "vllm.entrypoints.serve.utils.api_utils"])
def test_key_on_the_command_line_is_in_the_log(module: str) -> None:
    given = {"api_key": ["k3y", "k3y2"], "hf_token": "k3y", "seed": 7}
    line = written(module, logging.INFO, "non-default args: %s", given)
    assert line == "INFO non-default args: {'api_key': '***', 'hf_token': '***', 'seed': 7}"
    assert given["api_key"] == ["k3y", "k3y2"], "the keys in force"
    assert written(module, logging.INFO, "non-default args: %s", {}) == "INFO non-default args: {}"


def test_token_of_a_batch_file_is_in_the_log() -> None:
    given = argparse.Namespace(hf_token="k3y", seed=7)
    line = written("vllm.entrypoints.cli.run_batch", logging.INFO, "args: %s", given)
    assert line == "INFO args: Namespace(hf_token='***', seed=7)"
    assert given.hf_token == "k3y", "the token in force"


def test_each_answer_of_a_batch_file_is_warned_of() -> None:
    """Two lines for each answer of 0.11's `run-batch`: 2 000 for 1 000 requests."""
    name, text = "vllm.entrypoints.openai.protocol", "The following fields were present in the request but ignored: %s"
    assert written(name, logging.WARNING, text, {"reasoning"}) is None
    assert written(name, logging.WARNING, text, {"completion_tokens_details"}) is None
    assert written(name, logging.WARNING, text, {"reasoning", "top_x"}) is not None


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\x1b[2Jb"), "INFO A request was refused: a\\x1b[2Jb"),
        (TypeError("a"), "ERROR Error in preprocessing prompt inputs traceback"),
        (stopping_error()(), None),
    ],
    ids=["a client's mistake", "a failure", "the server's end"],
)
def test_mistake_of_a_client_fills_the_log_with_a_traceback(error: Exception, line: str | None) -> None:
    name = "vllm.entrypoints.openai.serving_completion"
    assert written(name, logging.ERROR, "Error in preprocessing prompt inputs", error=error) == line
