"""Requests that exceed a row of the V2 runner's tables are refused by field before the engine gets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.buffer_utils", reason="needs vLLM 0.33")

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample import bad_words, logit_bias

EOS = [200_002, 199_999, 200_012]


def made(sampling: SamplingParams) -> SamplingParams:
    """Sampling parameters as vLLM's own code makes them for the engine, with a tokenizer of one token per character."""
    tokenizer = SimpleNamespace(encode=lambda text, **_: [ord(each) for each in text], max_token_id=200_018)
    reader = SimpleNamespace(
        tokenizer=tokenizer,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False)
        ),
        renderer=SimpleNamespace(get_eos_token_id=lambda: EOS[0]),
        generation_config_fields={"eos_token_id": EOS},
        _validate_params=lambda *_: False,
        _validate_lora=lambda *_: None,
        _validate_model_inputs=lambda *_: None,
        apply_watermarking=lambda *_: None,
    )
    prompt = {"type": "token", "prompt_token_ids": [1]}
    return InputProcessor.process_inputs(reader, "a", prompt, sampling, ("generate",)).sampling_params


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runner's tables with one row: they accept a request or raise."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    rows = SimpleNamespace(
        max_num_reqs=1, device=torch.device("cpu"), prompt_len=SimpleNamespace(np=np.ones(1, dtype=np.int32))
    )
    tables = [logit_bias.LogitBiasState(None, rows), bad_words.BadWordsState(None, rows)]

    def take(sampling: SamplingParams) -> None:
        for table in tables:
            table.add_request(0, sampling)

    return take


@pytest.mark.parametrize(
    ("name", "most", "fields"),
    [
        ("allowed_token_ids", 1024, lambda count: {"allowed_token_ids": list(range(count))}),
        ("logit_bias", 1024, lambda count: {"logit_bias": dict.fromkeys(range(count), 1.0)}),
        ("stop_token_ids", 128 - len(EOS), lambda count: {"stop_token_ids": list(range(count)), "min_tokens": 1}),
        ("bad_words", 1024, lambda count: {"bad_words": ["a" * 256, "b" * 256, "c" * 256, "d" * (count - 768)]}),
    ],
)
def test_request_wider_than_a_row_is_refused(patched: Any, taken: Any, name: str, most: int, fields: Any) -> None:
    """Otherwise the worker's exception ends the engine."""
    with patched("row-widths"):
        taken(made(SamplingParams(**fields(most))))
        with pytest.raises(VLLMValidationError, match=f"{name}: expected at most") as refused:
            made(SamplingParams(**fields(most + 1)))
        assert refused.value.parameter == name


def test_stop_tokens_without_min_tokens_need_no_row(patched: Any, taken: Any) -> None:
    with patched("row-widths"):
        taken(made(SamplingParams(stop_token_ids=list(range(1000)))))
