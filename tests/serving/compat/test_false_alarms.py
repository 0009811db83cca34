"""Limits of open files; a server's log without the other warnings is looked at in tests/serving/test_openai_api.py."""

from __future__ import annotations

import importlib
import resource

import pytest

from npu_gptoss.serving.compat.start.false_alarms import MANY_FILES

UTILS = importlib.import_module("vllm.utils")


@pytest.mark.parametrize(("most", "asked"), [(20000, 20000), (100000, 65535), (MANY_FILES - 1, 65535)])
def test_fewer_open_files_than_the_machine_allows(most: int, asked: int, patched, monkeypatch) -> None:
    """Below MANY_FILES vLLM asks for more than there is, and its warning says so."""
    wanted = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, most))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    with patched("open-files"):
        UTILS.set_ulimit()
    assert wanted == [(asked, most)]
