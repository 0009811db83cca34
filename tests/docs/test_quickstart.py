"""`make serve` as the Makefile has it; every request of the pages to the server that it starts, and every load test."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.docs.shell import Command, all_commands, blocks
from tests.markdown import ROOT
from tests.scripts.make_serve import made

pytestmark = [pytest.mark.serving, pytest.mark.slow]
ADDRESS = "http://127.0.0.1:8000/"
REQUESTS = [command for command in all_commands() if command.text.startswith("curl ") and ADDRESS in command.text]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that was started as the pages say."""
    pytest.importorskip("vllm")
    with made("serve", tmp_path_factory.mktemp("make_serve") / "out.txt") as port:
        yield port


def promised(request: Command) -> dict[str, Any] | None:
    """The answer that the page shows below a request, if it shows one."""
    for block, below in pairwise(blocks((ROOT / request.page).read_text(encoding="utf-8"))):
        if block.first <= request.line < block.first + len(block.lines) and below.language == "json":
            return json.loads("\n".join(below.lines))
    return None


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda command: command.place)
def test_make_serve_answers_the_pages_request(request_: Command, port: int) -> None:
    text = request_.text.replace(ADDRESS, f"http://127.0.0.1:{port}/")
    done = subprocess.run(["bash", "-o", "pipefail", "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if (shown := promised(request_)) is not None:
        (choice,) = json.loads(done.stdout)["choices"]
        assert choice["finish_reason"] == shown["finish_reason"]
        for key, value in shown["message"].items():
            assert same(choice["message"][key], value), f"{key}: {choice['message'][key]}"


LOADS = [command for command in all_commands() if command.text.startswith("npu-gptoss bench serve ")]


@pytest.mark.parametrize("load", LOADS, ids=lambda command: command.place)
def test_make_serve_bears_the_pages_load(load: Command, port: int, tmp_path: Path) -> None:
    """With fewer requests. Each succeeds: the model has something to say to prompts of this kind and length."""
    pytest.importorskip("aiohttp")
    text = f"{load.text.replace('--json serve.json', '')} --url {ADDRESS.replace('8000', str(port))}v1"
    words = [*shlex.split(text)[1:], "--prompts", "4", "--json", str(tmp_path / "serve.json")]
    done = subprocess.run([sys.executable, "-m", "npu_gptoss.cli", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for record in json.loads((tmp_path / "serve.json").read_text())["records"]:
        assert (record["failed"], record["short_answers"]) == (0, 0)


def same(got: Any, shown: Any) -> bool:
    """Whether an answer holds what a page shows of it, which may leave fields out (ids of calls)."""
    if isinstance(shown, dict):
        return all(key in got and same(got[key], value) for key, value in shown.items())
    if isinstance(shown, list):
        return len(got) == len(shown) and all(same(*pair) for pair in zip(got, shown, strict=True))
    return got == shown


def test_readme_and_quickstart_promise_an_answer() -> None:
    pages = {request.page for request in REQUESTS if promised(request)}
    assert {"README.md", "README.zh.md", "docs/quickstart.md"} <= pages
    assert len(LOADS) == 2
    request = next(request for request in REQUESTS if request.page == "README.md")
    assert promised(request)["message"]["content"] == "3 + 4 = 7."
    assert not same({"content": "3 + 4 = 8.", "id": 1}, {"content": "3 + 4 = 7."})
    assert not same([{"a": 1}], [{"a": 1}, {"a": 1}])
