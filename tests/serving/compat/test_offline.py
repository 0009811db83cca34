"""`vllm.LLM.chat` with a structure: the answer's channel comes first."""

from __future__ import annotations

import json
from types import SimpleNamespace as Having
from typing import Any

import pytest

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")

from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from tests.harmony.conftest import tokenizer_files


@pytest.fixture
def llm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """One that returns the sampling parameters that its engine would get."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_files(tmp_path_factory.getbasetemp()))
    made = LLM.__new__(LLM)
    made.model_config = Having(runner_type="generate", hf_config=Having(model_type="gpt_oss"))
    monkeypatch.setattr(LLM, "get_tokenizer", lambda self: tokenizer)
    monkeypatch.setattr(LLM, "get_default_sampling_params", lambda self: SamplingParams())
    for name in ("_run_chat", "_add_chat_requests"):
        monkeypatch.setattr(LLM, name, lambda self, params=None, **_: params, raising=False)
    return made


def test_a_structure_of_a_chat_lacks_its_channel(patched: Any, llm: LLM) -> None:
    """The whole answer was `no`: no channel, and no reasoning."""
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    free, tag = SamplingParams(), StructuredOutputsParams(structural_tag="{}")
    framed = SamplingParams(structured_outputs=tag)
    with patched("offline-structures"):
        one = llm.chat([{"role": "user", "content": "x"}], asked)
        later = llm.enqueue_chat([{"role": "user", "content": "x"}], asked)
        assert llm.chat([{"role": "user", "content": "x"}], framed) is framed
        llm.chat([{"role": "user", "content": "x"}])
        several = llm.chat([[{"role": "user", "content": "x"}]] * 2, [asked, free])
        llm.model_config.hf_config.model_type = "llama"
        other = llm.chat([{"role": "user", "content": "x"}], asked)
    for params in (one, later, several[0]):
        assert "<|channel|>final" in json.dumps(json.loads(params.structured_outputs.structural_tag))
        assert params.structured_outputs.choice is None
    assert asked.structured_outputs.choice == ["yes", "no"], "the caller's own"
    assert (several[1].structured_outputs, other) == (None, asked)
