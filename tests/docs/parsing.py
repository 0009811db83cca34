"""Whether a command of a page would be understood: read by the parser of the program that it starts, nothing is run.

`objection(text)` is None or what is wrong, in the program's own words where it has some. Placeholders such as DIR or
/models/gpt-oss-20b are words like others. `vllm serve` takes seconds to import, so its commands are read together
(`vllm_objections`), and those of the shell scripts by tests/scripts/test_documented_commands.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest

from npu_gptoss import cli, envs
from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.registry import registry
from tests.markdown import ROOT
from tests.model import fuzz
from tests.soak import __main__ as soak

SHELL_SCRIPTS = ("scripts/serve.sh", "scripts/perf.sh", "scripts/eval.sh", "scripts/mmlu.sh")
OPERATORS = {"|", "&&", "||", ";", "&"}
VLLM_PARSER = """
import contextlib, io, json, sys
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
wrong = {}
for line in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(line)
    except SystemExit:
        wrong[" ".join(line)] = said.getvalue().strip().splitlines()[-1]
defaults = {option: str(action.default) for action in parser._actions for option in action.option_strings}
print(json.dumps({"wrong": wrong, "defaults": defaults}))
"""


class Parsed(Exception):
    """Raised in the place of what a program does once it has read its arguments."""


def objection(text: str, fragment: bool = False) -> str | None:
    """What is wrong with a line of shell. A `fragment`, in a sentence, may leave out what a program requires."""
    try:
        simple = split(text)
    except ValueError as error:
        return f"no shell reads it: {error}"
    return next((wrong for words in simple if (wrong := _objection(words, fragment))), None)


def split(text: str) -> list[list[str]]:
    """The simple commands of a line, without their redirections. Raises ValueError when a quote is not closed."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[list[str]] = [[]]
    words = iter(list(lexer))
    for word in words:
        if word in OPERATORS:
            found.append([])
        elif word in ("<", ">", ">>"):
            next(words, None)
        else:
            found[-1].append(word)
    return [words for words in found if words]


def _objection(words: list[str], fragment: bool) -> str | None:
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0], re.S):
        if wrong := variable_objection(words[0].partition("=")[0]):
            return wrong
        words = words[1:]
    if not words:
        return None
    program, rest = words[0], words[1:]
    name = program.rpartition("/")[2] if re.match(r"(\./)?\.venv[\w-]*/bin/", program) else program
    check = PROGRAMS.get(name)
    if check is None:
        return f"{program} is no program that tests/docs/parsing.py knows: add it to PROGRAMS there"
    return check(rest, fragment)


def variable_objection(name: str) -> str | None:
    if not name.startswith("NPU_GPTOSS_") or name in envs.VARIABLES:
        return None
    load_kernels()
    operations = {f"{o.family}_{o.mode}".upper() for o in registry.operations.values()}
    if name.startswith(envs.KERNEL_OVERRIDE_PREFIX) and name.removeprefix(envs.KERNEL_OVERRIDE_PREFIX) in operations:
        return None
    return f"there is no variable {name}"


@contextlib.contextmanager
def _only_parsing() -> Iterator[list[argparse.ArgumentParser]]:
    """Inside, the outermost parse_args or parse_known_args raises Parsed once it has succeeded; yields the parsers."""
    seen: list[argparse.ArgumentParser] = []
    originals = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_known_args")}

    def wrapped(original: Callable[..., object]) -> Callable[..., object]:
        def parse(self: argparse.ArgumentParser, *arguments: object, **keywords: object) -> object:
            outermost = not seen
            seen.append(self)
            result = original(self, *arguments, **keywords)
            if outermost:
                raise Parsed
            return result

        return parse

    try:
        for name, original in originals.items():
            setattr(argparse.ArgumentParser, name, wrapped(original))
        yield seen
    finally:
        for name, original in originals.items():
            setattr(argparse.ArgumentParser, name, original)


def _read_by(main: Callable[[list[str]], object], words: list[str], fragment: bool) -> str | None:
    said = io.StringIO()
    with _only_parsing() as parsers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *words])
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                main(words) if inspect.signature(main).parameters else main()
        except Parsed:
            return None
        except SystemExit as end:
            if end.code == 0:  # --help
                return None
    last = (said.getvalue().strip().splitlines() or ["the program ended before it read its arguments"])[-1]
    if parsers and ("…" in words or (fragment and "required" in last)):
        return _unknown_options(parsers[0], words)
    return last


def _unknown_options(parser: argparse.ArgumentParser, words: list[str]) -> str | None:
    """For a command that is not whole: an option that no parser on its way knows, or a subcommand that is not there."""
    known: set[str] = set()
    rest = [word for word in words if word != "…"]
    if rest and rest[0] == parser.prog.rpartition(" ")[2]:  # npu-gptoss COMMAND: the parser is the command's
        rest = rest[1:]
    while True:
        known |= {option for action in parser._actions for option in action.option_strings}
        below = next((a for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        named = [word for word in rest if not word.startswith("-")]
        if below is None or not named:
            break
        if named[0] not in below.choices:
            return f"invalid choice: {named[0]!r} (choose from {', '.join(below.choices)})"
        parser, rest = below.choices[named[0]], rest[rest.index(named[0]) + 1 :]
    unknown = [word for word in words if word.startswith("--") and word != "--" and word.partition("=")[0] not in known]
    return f"unrecognized arguments: {' '.join(unknown)}" if unknown else None


def _npu_gptoss(words: list[str], fragment: bool) -> str | None:
    if words[:1] == ["emulate"] and "--" in words:
        cut = words.index("--")
        inner = words[cut + 1 :]
        if inner and inner != ["COMMAND"] and (wrong := _objection(inner, fragment)):
            return wrong
    if words and words[0] not in cli.COMMANDS:
        return f"npu-gptoss has no command {words[0]!r}"
    return _read_by(cli.main, words, fragment)


def _python(words: list[str], fragment: bool) -> str | None:
    if words[:1] == ["-c"]:
        try:
            compile(words[1], "a page", "exec")
        except SyntaxError as error:
            return f"python does not read it: {error}"
        return None
    if words[:1] == ["-m"] and len(words) > 1:
        modules = {"npu_gptoss.cli": _npu_gptoss, "pip": _pip, "http.server": _anything, "venv": _anything}
        if words[1] == "pytest":
            return _places([word.partition("::")[0] for word in words[2:] if word.startswith("tests/")])
        if words[1] == "torch.distributed.run":
            return _torchrun(words[2:], fragment)
        check = modules.get(words[1])
        return check(words[2:], fragment) if check else f"-m {words[1]} is not known to tests/docs/parsing.py"
    script = words[0] if words else ""
    if "/" not in script:  # a program of the reader
        return None
    if wrong := _places([script]):
        return wrong
    return _read_by(_main_of(script), words[1:], fragment)


@cache
def _main_of(script: str) -> Callable[[list[str]], object]:
    """The function that a script runs; its module is imported under a name of its own."""
    path = ROOT / script
    text = path.read_text(encoding="utf-8")
    assert "argparse" in text or "page_tables" in text, f"{script} reads no arguments: calling it would run it"
    name = f"_documented_{path.stem}"
    sys.path.insert(0, str(path.parent))
    try:
        specification = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # dataclasses look their module up
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module.main


def _make(words: list[str], fragment: bool) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets, variables = (set(re.findall(p, text, re.M)) for p in (r"^([a-z-]+):", r"^([A-Z_]+) \?="))
    for word in words:
        name, assigned, value = word.partition("=")
        if not assigned and word not in targets:
            return f"the Makefile has no target {word!r}"
        if assigned and name not in variables:
            return f"the Makefile has no variable {name!r}"
        if name == "PYTEST_ARGS" and (
            wrong := _places([each.partition("::")[0] for each in value.split() if each.startswith("tests/")])
        ):
            return wrong
    return None


def _torchrun(words: list[str], fragment: bool) -> str | None:
    from torch.distributed.run import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            read = get_args_parser().parse_args(words)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    start = ["-m", read.training_script] if read.module else [read.training_script]
    return _python([*start, *read.training_script_args], fragment)


def _pip(words: list[str], fragment: bool) -> str | None:
    files = [word for before, word in zip(["", *words], words, strict=False) if before in ("-r", "-c")]
    places = [word for word in words[1:] if word == "." or word.startswith(("tests/", "requirements/"))]
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in words:
        named = re.fullmatch(r"(?:npu-gptoss|\.)\[(\w+)\]", word)
        if named and not re.search(rf"^{named[1]} = \[", extras, re.M):
            return f"pyproject.toml has no extra {named[1]!r}"
    return _places([*files, *places])


def _docker(words: list[str], fragment: bool) -> str | None:
    files = [word for before, word in zip(["", *words], words, strict=False) if before == "-f"]
    if wrong := _places(files):
        return wrong
    if words[:1] == ["compose"]:
        import yaml  # not there where only the tests of CUDA run

        services = yaml.safe_load((ROOT / (files or ["docker/compose.yaml"])[0]).read_text())["services"]
        profiles = {profile for service in services.values() for profile in service.get("profiles", [])}
        asked = {word for before, word in pairwise(words) if before == "--profile"}
        return f"there is no profile {', '.join(asked - profiles)}" if asked - profiles else None
    return None


def _run_910b(words: list[str], fragment: bool) -> str | None:
    command = ["sh", str(ROOT / "docker/run-910b.sh"), "--dry-run", *(word for word in words if word != "--dry-run")]
    run = subprocess.run(command, capture_output=True, text=True)
    return run.stderr.strip() if run.returncode else None


def _curl(words: list[str], fragment: bool) -> str | None:
    urls = [word for word in words if "://" in word]
    bad = [url for url in urls if not urllib.parse.urlsplit(url).hostname]
    if bad or not urls:
        return f"no address in it that can be asked: {words}"
    for before, word in pairwise(words):
        if before == "-d":
            try:
                json.loads(word)
            except json.JSONDecodeError as error:
                return f"its body is no JSON: {error}"
    return None


def _places(names: Sequence[str]) -> str | None:
    missing = [name for name in names if not (ROOT / name).exists()]
    return f"there is no {', '.join(missing)}" if missing else None


def _anything(words: list[str], fragment: bool) -> str | None:
    return None


PROGRAMS: dict[str, Callable[[list[str], bool], str | None]] = {
    "npu-gptoss": _npu_gptoss,
    **dict.fromkeys(("python", "python3", "python3.11"), _python),
    "make": _make,
    **dict.fromkeys(("pip", "pip3"), _pip),
    "torchrun": _torchrun,
    "docker": _docker,
    "docker/run-910b.sh": _run_910b,
    "curl": _curl,
    # read together by tests of their own
    **dict.fromkeys(("vllm", *SHELL_SCRIPTS), _anything),
    # nobody's but the reader's, and words of the shell
    **dict.fromkeys(
        ("git", "cd", "export", "read", "source", ".", "mkdir", "cat", "grep", "for", "do", "done"), _anything
    ),
    **dict.fromkeys(("npu-smi", "hccn_tool", "hf", "evalscope", "pre-commit"), _anything),
}


def vllm_lines(texts: Sequence[str]) -> list[list[str]]:
    """The words after `vllm serve` of every line that has it."""
    found = []
    for text in texts:
        for words in split(text):
            for index in range(len(words) - 1):
                if words[index].rpartition("/")[2] == "vllm" and words[index + 1] == "serve" and "…" not in words:
                    found.append(words[index + 2 :])
    return found


def vllm_says(lines: Sequence[Sequence[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """(what vLLM's own parser refuses, with its words; the default of each of its options)."""
    run = subprocess.run(
        [sys.executable, "-c", VLLM_PARSER],
        input=json.dumps(list(map(list, lines))),
        env={**os.environ, "NPU_GPTOSS_PLATFORM": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    return said["wrong"], said["defaults"]


def known_options() -> set[str]:
    """Every long option of the package's commands and of the scripts and programs beside it, those of vLLM left out."""
    mains: list[Callable[[list[str]], object]] = [
        lambda words, name=name: cli.main([name, *words]) for name in cli.COMMANDS
    ]
    for path in (*ROOT.glob("scripts/**/*.py"), *ROOT.glob("research/*.py"), *ROOT.glob("docker/*.py")):
        text = path.read_text(encoding="utf-8")
        if "\ndef main" in text and ("argparse" in text or "page_tables" in text):
            mains.append(_main_of(path.relative_to(ROOT).as_posix()))
    mains += [soak.main, fuzz.main]  # what `make soak` and `make fuzz-checkpoints` pass on
    found: set[str] = set()
    for main in mains:
        with _only_parsing() as parsers, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["program", "--help"])
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit, Parsed):
                main(["--help"]) if inspect.signature(main).parameters else main()
        found |= _options_of(parsers[0])
    for script in (*SHELL_SCRIPTS, "docker/run-910b.sh"):
        found |= script_options(script)
    return {option for option in found if option.startswith("--")}


def _options_of(parser: argparse.ArgumentParser) -> set[str]:
    found = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= _options_of(below)
    return found


def script_options(script: str) -> set[str]:
    """The long options that a shell script's help lists."""
    told = subprocess.run(["sh", str(ROOT / script), "--help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  (--[\w-]+)", told, re.M))
