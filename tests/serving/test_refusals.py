"""Prints every refusal of a setting, a stack and a config.json (`pytest -s`) and checks the form of each sentence."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("vllm.entrypoints.openai.cli_args", reason="needs vLLM before 0.33")

from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser

from npu_gptoss.errors import Refusal
from npu_gptoss.serving import limits
from npu_gptoss.serving.ascend import limits as ascend
from npu_gptoss.serving.cuda import limits as cuda
from tests.refusal_list import of_config, of_stack
from tests.serving.cuda.test_limits import MXFP4, config_of
from tests.serving.test_ascend import configuration as ascend_config
from tests.serving.test_plugin import configuration

pytestmark = pytest.mark.serving

LONGEST = 330  # characters, without what a user wrote
SETTING = re.compile(r"--[a-z][a-z0-9-]+|[A-Z0-9]+(_[A-Z0-9]+)+|[a-z_]+[a-z0-9_.-]*|CANN")
REMEDY = re.compile(r"(add|ask|check|correct|give|install|leave|merge|remove|run|take|unset|use) ")
RIDDLES = re.compile(r"\b(who|whoever|whose|nobody|somebody|told|tells|those|whether|neither|beside|unasked|bound)\b")


@pytest.fixture
def every(monkeypatch, tmp_path) -> list[Refusal]:
    """All refusals; the rows of a table come with those that do not hold here."""
    for package in ("operator", "triton", "cann"):
        monkeypatch.setattr(ascend, f"{package}_objection", lambda: None)
    rows = [*limits.checks(configuration(), "cpu"), *ascend.checks(ascend_config())]
    rows += cuda.checks(config_of(hf_config=MXFP4, tensor_parallel_size=4))
    monkeypatch.undo()
    return [refusal for _, refusal in rows] + of_stack(monkeypatch, tmp_path) + of_config()


def wrong_form(refusal: Refusal) -> str:
    sentence = str(refusal)
    faults = {
        "the option is not written as a user writes it": not SETTING.fullmatch(refusal.option),
        "no reason": len(refusal.why) < 10 or refusal.why.endswith((".", ";", ",")),
        "the remedy is no command": not REMEDY.match(refusal.remedy) or refusal.remedy.endswith("."),
        "more than one sentence": bool(re.search(r"[.!?] [A-Z]", sentence)),
        "too long": len(sentence) > LONGEST,
        "a riddle": bool(RIDDLES.search(f"{refusal.why} {refusal.remedy}")),
    }
    return "; ".join(fault for fault, found in faults.items() if found)


def test_every_refusal_has_one_form(every: list[Refusal]) -> None:
    print(*every, sep="\n")
    assert len(every) > 100
    assert {str(refusal): fault for refusal in every if (fault := wrong_form(refusal))} == {}


def test_refused_options_are_options_of_vllm() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    known = {option for action in parser._actions for option in action.option_strings}
    asked = {refusal.option for _, refusal in limits.checks(configuration(), "cpu")}
    assert {option for option in asked if option.startswith("--")} - known == set()
