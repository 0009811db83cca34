"""A key on the command line stays out of vLLM's log."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make setup")

from vllm.entrypoints import utils
from vllm.entrypoints.openai import api_server
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser

from npu_gptoss.serving import compat

pytestmark = pytest.mark.serving
SECRET = "k3y-of-a-test"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(utils.logger, "info", lambda text, *values: told.append(text % values))
    return told


@pytest.fixture
def arguments() -> Namespace:
    words = ["--model", "x", "--api-key", SECRET, f"{SECRET}2", "--hf-token", SECRET, "--seed", "7"]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def test_stock_vllm_writes_the_key_into_its_log(log: list[str], arguments: Namespace) -> None:
    utils.log_non_default_args(arguments)
    assert SECRET in log[0]


def test_the_key_is_not_written_into_the_log_and_stays_in_force(log: list[str], arguments: Namespace) -> None:
    compat.apply()
    api_server.log_non_default_args(arguments)
    assert SECRET not in log[0]
    assert "'api_key': '***'" in log[0]
    assert "'seed': 7" in log[0]
    assert arguments.api_key == [SECRET, f"{SECRET}2"]
    assert arguments.hf_token == SECRET
