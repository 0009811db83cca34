"""The files of `vllm run-batch` are checked before an engine starts."""

from __future__ import annotations

import asyncio
import json
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai import api_server, run_batch

from npu_gptoss.errors import InputError

pytestmark = pytest.mark.serving

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
REQUEST = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
GOOD = json.dumps(REQUEST)


class Started(Exception):
    """The engine starts."""


@pytest.fixture
def run(patched: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(api_server, "build_async_engine_client", start)

    def run(input_file: Path | str, output_file: Path | str) -> None:
        structures = types.SimpleNamespace(reasoning_parser="")
        files = {"input_file": str(input_file), "output_file": str(output_file)}
        with patched("batch-file"):
            asyncio.run(run_batch.main(types.SimpleNamespace(**files, structured_outputs_config=structures)))

    return run


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "JSON"),
        (json.dumps({"custom_id": "1", "method": "POST", "body": BODY}), "url"),
        (json.dumps(REQUEST | {"body": {"model": "m"}}), "messages"),
        (json.dumps(REQUEST | {"url": "/v1/completions", "body": {"prompt": "a"}}), "messages"),
    ],
    ids=["no JSON", "no url", "no messages", "a completion"],
)
def test_line_that_is_no_request_is_not_named(run: Any, tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(InputError, match=f"line 3: .*{said}") as refused:
        run(file, tmp_path / "out.jsonl")
    assert refused.value.field == "--input-file"


@pytest.mark.parametrize("place", ["nowhere/out.jsonl", "."])
def test_answers_of_a_whole_batch_cannot_be_written(run: Any, tmp_path: Path, place: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(GOOD)
    with pytest.raises(InputError) as refused:
        run(file, tmp_path / place)
    assert refused.value.field == "--output-file"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["none", "no UTF-8"])
def test_file_that_cannot_be_read_ends_in_a_traceback(run: Any, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "in.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError) as refused:
        run(file, tmp_path / "out.jsonl")
    assert refused.value.field == "--input-file"


def test_files_that_are_right_or_elsewhere_are_refused(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f"{GOOD}\n\n{GOOD}")
    for files in ((file, tmp_path / "out.jsonl"), ("http://127.0.0.1:9/in", "https://127.0.0.1:9/out")):
        with pytest.raises(Started):
            run(*files)
