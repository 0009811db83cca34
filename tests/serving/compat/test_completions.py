"""A completion's chunks are the bytes that vLLM writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

serving = pytest.importorskip("vllm.entrypoints.openai.completion.serving", reason="needs vLLM 0.33")

LOGPROBS = {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["a"], "top_logprobs": [{"a": -0.5}]}
ALONE: dict[str, Any] = {
    **{"index": 1, "text": "x", "logprobs": None, "finish_reason": None, "stop_reason": None},
    **{"prompt_token_ids": None, "token_ids": None, "weight_versions": None},
}
CHOICES: dict[str, dict[str, Any]] = {
    "a text": {},
    "no text": {"text": ""},
    "what JSON escapes": {"text": 'a"\\\b\f\n\r\t\0\x1f\x7f/</script>'},
    "other alphabets": {"text": "é 漢字 🙂 \u2028\ufffd"},
    "the end": {"finish_reason": "stop", "stop_reason": "END"},
    "a stop token": {"finish_reason": "stop", "stop_reason": 0},
    "its tokens": {"token_ids": [5]},
    "the prompt's": {"prompt_token_ids": []},
    "log-probabilities": {"logprobs": LOGPROBS},
}
LATER: dict[str, dict[str, Any]] = {
    "nothing more": {},
    "a usage": {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}},
    "a fingerprint": {"system_fingerprint": "vllm"},
}


def written(choice: dict[str, Any], later: dict[str, Any], **more: Any) -> str:
    chunk = serving.CompletionStreamResponse(
        **{"id": 'c"1', "object": "text_completion", "created": 7, "model": 'a "model" é'},
        choices=[serving.CompletionResponseStreamChoice(**ALONE | choice)],
        **{"kv_transfer_params": None} | more,
    )
    for name, value in later.items():
        setattr(chunk, name, serving.UsageInfo(**value) if name == "usage" else value)
    return chunk.model_dump_json(exclude_unset=True)


@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_chunk_has_the_bytes_that_pydantic_writes(choice, later, patched, monkeypatch):
    with patched():
        want, own, made = written(choice, later), serving.CompletionStreamResponse, []
    init = own.__init__
    monkeypatch.setattr(own, "__init__", lambda self, **fields: (made.append(self), init(self, **fields))[1])
    with patched("completion-chunks"):
        assert written(choice, later) == want
    assert json.loads(want)["choices"][0]["index"] == 1
    assert bool(made) != (choice.keys() <= {"text"} and not later), "pydantic writes what is more than a text"


def test_other_chunks_are_pydantics(patched):
    def ending() -> str:
        usage = serving.UsageInfo(prompt_tokens=1, completion_tokens=2, total_tokens=3)
        chunk = serving.CompletionStreamResponse(id="c", created=7, model="m", choices=[], usage=usage)
        return chunk.model_dump_json(exclude_unset=False, exclude_none=True)

    with patched():
        want = ending(), written({}, {}, kv_transfer_params={"a": 1})
    with patched("completion-chunks"):
        assert (ending(), written({}, {}, kv_transfer_params={"a": 1})) == want
