"""The server of `make serve` answers every request of a page as the page shows."""

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

from tests.markdown import ALL_COMMANDS, ROOT, Command, blocks, name_of, unseen
from tests.scripts.make_serve import made
from tests.serving.server import wait_for

ADDRESS = "http://127.0.0.1:8000/"
REQUESTS = [command for command in ALL_COMMANDS if command.text.startswith("curl ") and ADDRESS in command.text]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that the pages' command started."""
    pytest.importorskip("vllm")
    with made("serve", tmp_path_factory.mktemp("make_serve") / "out.txt") as port:
        yield port


def promised(request: Command) -> dict[str, Any] | None:
    """The answer that the page shows below a request, if any."""
    for block, below in pairwise(blocks(ROOT / request.page)):
        if block.line <= request.line < below.line and below.language == "json":
            return json.loads(below.text)
    return None


@pytest.mark.serving
@pytest.mark.slow
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
            assert holds(choice["message"][key], value), f"{key}: {choice['message'][key]}"


TUTORIAL = ROOT / "docs/tutorials/without-an-accelerator.md"


@pytest.mark.serving
@pytest.mark.slow
def test_the_tutorials_metrics_are_not_those_of_its_questions(port: int) -> None:
    """Counted from before its two questions, as on a server that has just started."""
    asked = [command for command in REQUESTS if command.page == name_of(TUTORIAL)]

    def run(command: Command) -> str:
        text = command.text.replace(ADDRESS, f"http://127.0.0.1:{port}/")
        return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120, check=True).stdout

    *questions, metrics = asked

    def counted() -> list[list[str]]:
        """Once they rest: the engine tells of a step's counts after its tokens."""
        seen = [""]

        def rest() -> bool:
            seen.append(run(metrics))
            return seen[-1] == seen[-2]

        assert wait_for(rest, 30)
        return [line.rsplit(" ", 1) for line in seen[-1].splitlines()]

    before = dict(counted())
    assert len([run(question) for question in questions]) == 2
    after = counted()
    since = (f"{name} {float(value) - float(before[name]) * ('_total' in name)}" for name, value in after)
    (shown,) = (block for block in blocks(TUTORIAL) if "attention.paged.small_ops" in block.text)
    assert unseen(shown.text, "\n".join(since)) == []


@pytest.mark.slow
def test_the_tutorial_does_not_show_what_generate_prints() -> None:
    found = next(c for c in ALL_COMMANDS if c.page.endswith(TUTORIAL.name) and "npu-gptoss generate " in c.text)
    (shown,) = [b for a, b in pairwise(blocks(TUTORIAL)) if a.line <= found.line < b.line]
    program = Path(sys.executable).with_name("npu-gptoss")
    words = [str(program), *shlex.split(found.text.partition("#")[0])[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert unseen(shown.text, done.stdout) == [], done.stdout


# the one of chats: tests/serving/test_openai_api.py
LOADS = [c for c in ALL_COMMANDS if c.text.startswith("vllm bench serve ") and "openai-chat" not in c.text]


@pytest.mark.serving
@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=lambda command: command.place)
def test_make_serve_bears_the_pages_load(load: Command, port: int, tmp_path: Path) -> None:
    """With fewer requests. Each succeeds: the model has something to say to prompts of this kind and length."""
    words = shlex.split(load.text.replace(ADDRESS.rstrip("/"), f"http://127.0.0.1:{port}"))
    fewer = ["--num-prompts", "4", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "load.json"]
    program = Path(sys.executable).with_name(words[0])
    done = subprocess.run([program, *words[1:], *fewer], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "load.json").read_text())
    assert result["completed"] == 4
    assert result["total_output_tokens"] >= 4
    if "--ignore-eos" in words:
        assert result["total_output_tokens"] == 4 * int(words[words.index("--random-output-len") + 1])


def holds(got: Any, shown: Any) -> bool:
    """Compares an answer with a page, which may leave fields out (ids of calls)."""
    if isinstance(shown, dict):
        return all(key in got and holds(got[key], value) for key, value in shown.items())
    if isinstance(shown, list):
        return len(got) == len(shown) and all(holds(*pair) for pair in zip(got, shown, strict=True))
    return got == shown


def test_readme_and_tutorial_promise_an_answer() -> None:
    answers = {request.page for request in REQUESTS if promised(request)}
    assert answers >= {"README.md", "README.zh.md", name_of(TUTORIAL)}
