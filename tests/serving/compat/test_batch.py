"""The files of `vllm run-batch`, whose module is a fake; tests/serving/compat/test_compat.py finds the real one."""

from __future__ import annotations

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.start import batch


class BatchRequestInput(BaseModel):
    url: str
    body: Any

    @field_validator("body", mode="plain")
    @classmethod
    def check(cls, value: Any, info: Any) -> Any:  # as vLLM's: a KeyError where the url is wrong
        if info.data["url"] == "/x" and value != {}:
            raise ValueError("no such body")
        return value


async def run_batch(args: Any, request_json: str) -> Any:
    return BatchRequestInput.model_validate_json(request_json)


async def write_local_file(output_path: str, batch_outputs: list[str]) -> None:
    Path(output_path).write_text("\n".join(batch_outputs))


async def write_file(path_or_url: str, batch_outputs: list[str], output_tmp_dir: str) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def module() -> Any:
    started = []

    async def main(args: Any) -> None:
        started.append(args)

    names = {f.__name__: f for f in (BatchRequestInput, run_batch, main, write_file, write_local_file)}
    module = types.SimpleNamespace(**names, started=started)
    batch.install(module)
    return module


GOOD = b'{"url": "/x", "body": {}}'


@pytest.mark.parametrize(
    "bad", [b'{"url": "/x", "bo', b'{"url": 7, "body": {}}', b'{"url": "/x", "body": 1}', b"\xff", b"[]"]
)
def test_bad_line_ends_a_batch_after_its_engine_started(tmp_path: Path, module: Any, bad: bytes) -> None:
    (tmp_path / "in").write_bytes(b"\n".join([GOOD, b"", GOOD, bad, GOOD]))
    args = types.SimpleNamespace(input_file=str(tmp_path / "in"), output_file=str(tmp_path / "out"))
    with pytest.raises(InputError, match="line 4: ") as caught:
        asyncio.run(module.main(args))
    assert (caught.value.field, module.started) == ("--input-file", [])
    (tmp_path / "in").write_bytes(GOOD + b"\n\n")
    asyncio.run(module.main(args))
    assert module.started == [args]


@pytest.mark.parametrize("output", ["", "no/such/folder", "x" * 300 + "/out"])
def test_output_that_cannot_be_written_is_seen_after_the_answers(tmp_path: Path, module: Any, output: str) -> None:
    args = types.SimpleNamespace(input_file="/dev/null", output_file=str(tmp_path / output))
    with pytest.raises(InputError) as caught:
        asyncio.run(module.main(args))
    assert (caught.value.field, module.started) == ("--output-file", [])
    for name in ("https://127.0.0.1/out", "/dev/null"):
        asyncio.run(module.main(types.SimpleNamespace(input_file="/dev/null", output_file=name)))


def test_answers_are_lost_when_the_disk_is_full(tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(InputError, match="No space") as caught:
        asyncio.run(module.write_file("out", ["1", "2"], None))
    (kept,) = tmp_path.rglob("*.jsonl")
    assert kept.read_text() == "1\n2"
    assert str(kept) in str(caught.value)
