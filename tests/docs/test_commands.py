"""Each command of a page is taken by its own program; each command has its own tests elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from npu_gptoss import cli
from tests.markdown import ALL_COMMANDS, PAGES, ROOT, Block, blocks, commands, name_of

VLLM_PARSER = """
import json, sys
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for line in json.load(sys.stdin):
    print(line, file=sys.stderr)
    parser.parse_args(line)
print("done", file=sys.stderr)
parser.parse_args(["DIR", "--max-model-length", "1"])
"""


class Parsed(Exception):
    """Ends a program once it has read its arguments."""


def simple_commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a line of shell, without redirections and assignments."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in (read := iter([*lexer, ";"])):
        if set(word) <= set("|&;"):
            if words:
                yield words
            words = []
        elif set(word) <= set("<>"):
            next(read)
        elif words or not re.match(r"[A-Z][A-Z0-9_]*=", word):
            words.append(word)


def parse(program: Callable[[], object], *arguments: str) -> None:
    """Runs a program until its own parser has taken the arguments; SystemExit when it refuses them."""
    depth = 0  # parse_args calls parse_known_args, and so do commands within commands

    def ended(read: Callable[..., object]) -> Callable[..., object]:
        def outermost(*arguments: Any, **keywords: Any) -> object:
            nonlocal depth
            depth += 1
            result = read(*arguments, **keywords)
            depth -= 1
            if not depth:
                raise Parsed
            return result

        return outermost

    parser = argparse.ArgumentParser
    readers = {name: ended(getattr(parser, name)) for name in ("parse_args", "parse_known_args")}
    argv = mock.patch.object(sys, "argv", ["program", *arguments])
    with mock.patch.multiple(parser, **readers), argv, contextlib.suppress(Parsed):
        sys.exit(program())


def check(text: str) -> None:
    """Raises SystemExit or OSError where a program, make among them, would refuse a line of shell."""
    for words in simple_commands(text):
        program, rest = words[0].rpartition("/")[2], words[1:]
        if "npu_gptoss.cli" in rest:  # below python or torchrun
            program, rest = "npu-gptoss", rest[rest.index("npu_gptoss.cli") + 1 :]
        if program == "npu-gptoss":
            if rest[0] == "emulate" and "--" in rest:
                check(shlex.join(rest[rest.index("--") + 1 :]))
            with contextlib.suppress(SystemExit) if "--version" in rest else contextlib.nullcontext():
                parse(cli.main, *rest)
        elif program == "make":
            text = (ROOT / "Makefile").read_text(encoding="utf-8")
            for name, assigned, _ in (word.partition("=") for word in rest):
                if not re.search(rf"^{name} \?=" if assigned else rf"^{name}:", text, re.M):
                    sys.exit(f"the Makefile has no {name}")
        elif program.startswith("python") and rest and "/" in rest[0]:
            with mock.patch.object(sys, "path", [str((ROOT / rest[0]).parent), *sys.path]):
                parse(partial(runpy.run_path, str(ROOT / rest[0]), run_name="__main__"), *rest[1:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_program_takes_every_command_of_a_page(page: Path) -> None:
    for command in commands(page):
        if "…" not in command.text:
            try:
                check(command.text)
            except (SystemExit, OSError) as error:
                pytest.fail(f"{command.place}: `{command.text}`: {error}")


@pytest.mark.serving
@pytest.mark.slow
def test_vllm_takes_every_vllm_serve_of_a_page() -> None:
    pytest.importorskip("vllm")
    lines = [
        words[words.index("serve") + 1 :]
        for command in ALL_COMMANDS
        for words in simple_commands(command.text)
        if re.search(r"\bvllm serve\b", " ".join(words)) and "…" not in words
    ]
    assert len(lines) >= 3
    environment = {**os.environ, "NPU_GPTOSS_PLATFORM": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", VLLM_PARSER]
    run = subprocess.run(command, input=json.dumps(lines), env=environment, cwd=ROOT, capture_output=True, text=True)
    assert "done\n" in run.stderr, run.stderr[-3000:]
    assert run.returncode == 2, "an option that does not exist was taken"


OWN_TEST = ("docs/add-a-kernel.md", "docs/serving-on-cpu.md")  # their Python has tests elsewhere
BLOCKS = [(page, block) for page in PAGES for block in blocks(page) if block.language in ("python", "json")]


@pytest.mark.parametrize(("page", "block"), [pytest.param(p, b, id=f"{name_of(p)}:{b.line}") for p, b in BLOCKS])
def test_a_page_s_python_runs_and_its_json_is_read(page: Path, block: Block) -> None:
    if block.language == "json":
        assert json.loads(block.text)
    elif name_of(page) in OWN_TEST or name_of(page).startswith("emulator/"):
        compile(block.text, str(page), "exec")
    else:
        subprocess.run([sys.executable, "-c", block.text], cwd=ROOT, check=True)
