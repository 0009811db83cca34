"""What a page names is there: options, environment variables, files, tests, links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from npu_gptoss import envs
from npu_gptoss.serving.compat import patches
from scripts.docs.docs_site import is_external, links, resolved
from tests.docs.dry import simple_commands
from tests.markdown import ALL_COMMANDS, PAGES, ROOT, name_of, spans

FOLDERS = "npu_gptoss|emulator|research|scripts|tests|docs|docker|requirements|patches"
# of pytest, pip, docker, evalscope, certbot, vllm bench
FOREIGN_OPTIONS = {
    *("--pdb", "--constraint", "--no-deps", "--require-hashes", "--privileged", "--build", "--restart", "--use-cache"),
    *("--warmup-num", "--nginx", "--no-binary", "--max-concurrency", "--request-rate", "--save-result"),
    *("--reasoning-effort-map", "--shutdown-timeout"),  # of vLLM 0.33
    "--data-parallel-multi-port-external-lb",  # of vLLM 0.23
    "--num-cpus",  # of Ray
}
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
print(json.dumps({"wrong": wrong, "options": [o for action in parser._actions for o in action.option_strings]}))
"""


@cache
def sources() -> dict[str, str]:
    """Every file of the repository that is no page, by its path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".sh", ".yaml", ".yml", "Dockerfile", "Makefile")
    files = [name for name in listed if name.endswith(kinds) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in files}


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))


@pytest.mark.serving
@pytest.mark.slow
def test_every_option_that_a_page_names_exists() -> None:
    """Ours stand in our code; vLLM's parser takes every `vllm serve` of every page, and no option that is made up."""
    pytest.importorskip("vllm")
    mistake = ["DIR", "--max-model-length", "1"]
    lines = [
        words[words.index("serve") + 1 :]
        for command in ALL_COMMANDS
        for words in simple_commands(command.text)
        if re.search(r"\bvllm serve\b", " ".join(words)) and "…" not in words
    ]
    run = subprocess.run(
        [sys.executable, "-c", VLLM_PARSER],
        input=json.dumps([*lines, mistake]),
        env={**os.environ, "NPU_GPTOSS_PLATFORM": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert len(lines) >= 3
    assert set(said["wrong"]) == {" ".join(mistake)}, said["wrong"]
    ours = {
        option for name, text in sources().items() if not name.startswith("tests/docs/") for option in options(text)
    }
    known = ours | set(said["options"]) | FOREIGN_OPTIONS
    assert "--max-model-length" not in known
    named = {(name_of(page), option) for page in PAGES for span in spans(page) for option in options(span)}
    assert sorted((page, option) for page, option in named if option not in known) == []


def test_every_variable_that_a_page_names_exists() -> None:
    elsewhere = "\n".join(text for name, text in sources().items() if not name.startswith("tests/"))
    kernels = {f"{envs.KERNEL_OVERRIDE_PREFIX}{operation}" for operation in envs.KERNEL_OPERATIONS}
    for page in PAGES:
        for name in re.findall(r"\bNPU_GPTOSS_[A-Z0-9_]*[A-Z0-9]\b(?!_)", page.read_text(encoding="utf-8")):
            known = name in envs.VARIABLES or name in kernels or re.search(rf"\b{name}\b", elsewhere)
            assert known, f"{name_of(page)}: {name}"


def test_every_patch_that_a_page_names_exists() -> None:
    known = {patch.name for patch in patches()}
    named = {name for page in PAGES for name in re.findall(r"\bpatch `([\w-]+)`", page.read_text(encoding="utf-8"))}
    assert named
    assert named <= known


def wrong_name(span: str, home: Path = ROOT) -> bool:
    """A file, of the repository or beside the page in `home`, or a test that is not there; other code is right."""
    if found := re.fullmatch(rf"((?:{FOLDERS})/[\w./-]+)(?:::(\w+)(?:\[\w+\])?)?", span):
        file, test = found.groups()
        there = [folder / file for folder in (home, ROOT) if (folder / file).exists()]
        return not there or (test is not None and f"def {test}(" not in there[0].read_text())
    if re.fullmatch(r"(test|case)_\w+", span):
        return not any(f"def {span}(" in text for text in sources().values())
    if re.fullmatch(r"test_\w+\.py", span):
        return not any(name.endswith(f"/{span}") for name in sources())
    return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_and_test_that_a_page_names_exists(page: Path) -> None:
    assert [span for span in spans(page) if wrong_name(span, page.parent)] == []


@pytest.mark.parametrize("span", ["scripts/no.sh", "tests/test_cli.py::test_nothing", "test_that_nobody_wrote"])
def test_a_name_that_is_not_there_is_found(span: str) -> None:
    assert wrong_name(span)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file(page: Path) -> None:
    """In the repository; MkDocs checks the site's, with their anchors (test_site.py)."""
    local = [target for _, target in links(page.read_text(encoding="utf-8")) if not is_external(target)]
    assert [target for target in local if not (ROOT / resolved(target, name_of(page))[0]).exists()] == []
