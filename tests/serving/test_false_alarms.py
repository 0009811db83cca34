"""A start prints no warning that asks nothing of the user; the log of a whole start is in test_openai_api.py."""

from __future__ import annotations

import importlib.util
import logging
import resource
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from npu_gptoss.serving import false_alarms

pytestmark = pytest.mark.serving


@pytest.mark.parametrize(
    ("soft", "hard", "raised"), [(1024, 20000, 20000), (1024, 100000, 65535), (1024, resource.RLIM_INFINITY, 65535)]
)
def test_fewer_open_files_than_the_machine_allows(soft, hard, raised, monkeypatch) -> None:
    wanted = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    assert false_alarms.open_more_files() == raised
    assert wanted == [(raised, hard)]


@pytest.mark.parametrize(("most", "warned"), [(1024, True), (20000, False)])
def test_few_open_files_are_still_warned_of(most: int, warned: bool, monkeypatch) -> None:
    logger = logging.getLogger(f"npu_gptoss.test.{most}")
    monkeypatch.setattr(false_alarms, "FALSE_ALARMS", [(logger.name, "Found ulimit of ", "")])
    monkeypatch.setattr(false_alarms, "open_more_files", lambda: most)
    for _ in range(2):
        false_alarms.silence()
    assert bool(logger.filter(logging.makeLogRecord({"msg": "Found ulimit of %s and failed"}))) is warned
    assert logger.filter(logging.makeLogRecord({"msg": "another"}))
    assert len(logger.filters) == (0 if warned else 1)


def test_each_filtered_message_is_one_that_this_vllm_prints() -> None:
    """A message that a release words otherwise would be printed again; a logger of another release has no module."""
    found = 0
    for name, beginning, _ in false_alarms.FALSE_ALARMS:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if spec is not None and beginning in Path(spec.origin).read_text():
            found += 1
    assert found >= 5
