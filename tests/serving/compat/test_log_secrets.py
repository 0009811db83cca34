"""A key on the command line stays out of vLLM's log."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make setup")

from vllm.entrypoints.openai import api_server

from npu_gptoss.serving.compat.patch import stock
from tests.serving.compat.of_release import parsed

pytestmark = pytest.mark.serving
SECRET = "k3y-of-a-test"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    logger = logging.getLogger(stock(api_server.log_non_default_args).__module__)
    monkeypatch.setattr(logger, "info", lambda text, *values: told.append(text % values))
    return told


@pytest.fixture
def arguments() -> Namespace:
    return parsed("--model", "x", "--api-key", SECRET, f"{SECRET}2", "--hf-token", SECRET, "--seed", "7")


def test_key_is_hidden_in_the_log_and_stays_in_force(patched: Any, log: list[str], arguments: Namespace) -> None:
    with patched("keys-unsaid"):
        api_server.log_non_default_args(arguments)
    (ours,) = log
    assert SECRET not in ours
    assert "'api_key': '***'" in ours
    assert "'seed': 7" in ours
    assert arguments.api_key == [SECRET, f"{SECRET}2"]
    assert arguments.hf_token == SECRET
