"""Whether a documented command would be understood: its own parser reads it, and nothing runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import cache
from unittest import mock

from npu_gptoss import cli
from tests.markdown import ROOT


class Parsed(Exception):
    """Raised in the place of what a program does once it has read its arguments."""


def simple_commands(text: str) -> list[list[str]]:
    """The simple commands of a line of shell, without redirections and assignments."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    words = iter(list(lexer))
    for word in words:
        if set(word) <= set("|&;"):
            found.append([])
        elif set(word) <= set("<>"):
            next(words, None)
        elif found[-1] or not re.match(r"[A-Z][A-Z0-9_]*=", word):
            found[-1].append(word)
    return [words for words in found if words]


def objection(text: str) -> str | None:
    """What is wrong with a line of shell, in the words of the program concerned."""
    try:
        return next((wrong for words in simple_commands(text) if (wrong := _objection(words))), None)
    except ValueError as error:
        return f"no shell reads it: {error}"


def _objection(words: list[str]) -> str | None:
    program, rest = words[0], words[1:]
    name = program.rpartition("/")[2]
    if name == "npu-gptoss":
        if rest[:1] == ["emulate"] and "--" in rest:
            cut = rest.index("--") + 1
            return _parse(cli.main, [*rest[:cut], "true"]) or _objection(rest[cut:])
        if rest and rest[0] not in cli.COMMANDS:
            return f"npu-gptoss has no command {rest[0]!r}"
        return _parse(cli.main, rest)
    if name == "make":
        return _make(rest)
    if name in ("python", "python3", "torchrun"):
        if "npu_gptoss.cli" in rest:
            return _parse(cli.main, rest[rest.index("npu_gptoss.cli") + 1 :])
        script = rest[0] if rest else ""
        if "/" in script:
            return _parse(_main_of(script), rest[1:]) if (ROOT / script).is_file() else f"there is no {script}"
    if program.startswith(("scripts/", "docker/")) and not os.access(ROOT / program, os.X_OK):
        return f"{program} cannot be run"
    missing = [word for word in rest if word.startswith("requirements/") and not (ROOT / word).exists()]
    return f"there is no {missing[0]}" if missing else None


def _make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, assigned, value = word.partition("=")
        if not re.search(rf"^{name} \?=" if assigned else rf"^{name}:", text, re.M):
            return f"the Makefile has no {word!r}"
        for place in re.findall(r"tests/[\w/.]+", value):
            if not (ROOT / place).exists():
                return f"there is no {place}"
    return None


@contextlib.contextmanager
def _only_parsing() -> Iterator[None]:
    """Inside, the outermost call of a parser raises Parsed once it has succeeded."""
    depth = 0

    def wrapped(original: Callable[..., object]) -> Callable[..., object]:
        def parse(*arguments: object, **keywords: object) -> object:
            nonlocal depth
            depth += 1
            result = original(*arguments, **keywords)
            depth -= 1
            if depth == 0:
                raise Parsed
            return result

        return parse

    parser = argparse.ArgumentParser
    names = ("parse_args", "parse_known_args")
    with mock.patch.multiple(parser, **{name: wrapped(getattr(parser, name)) for name in names}):
        yield


def _parse(main: Callable[..., object], words: list[str]) -> str | None:
    said = io.StringIO()
    try:
        with _only_parsing(), mock.patch.object(sys, "argv", ["program", *words]), contextlib.redirect_stderr(said):
            main(words) if inspect.signature(main).parameters else main()
    except Parsed:
        return None
    except SystemExit as end:
        if end.code == 0:  # --help
            return None
    return (said.getvalue().strip().splitlines() or ["the program ended before it read its arguments"])[-1]


@cache
def _main_of(script: str) -> Callable[..., object]:
    """The function that a script runs; its module is imported under a name of its own."""
    path = ROOT / script
    name = f"_documented_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look their module up
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        specification.loader.exec_module(module)
    return module.main
