"""README, its translation and CONTRIBUTING agree with the repository."""

from __future__ import annotations

import json
import re
import shlex

from scripts.docs.docs_site import links
from scripts.serve_here import TINY_NAME, TINY_QUESTION, example_request
from tests.markdown import ROOT, blocks, commands
from tests.scripts.shell import make

README, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"


def test_the_chinese_readme_has_the_same_commands_and_links() -> None:
    other = {"README.md", "README.zh.md"}
    english, chinese = (
        ([block.text for block in blocks(page)], [t for _, t in links(page.read_text("utf-8")) if t not in other])
        for page in (README, CHINESE)
    )
    assert english[0]
    assert chinese == english


def test_the_readmes_request_is_the_one_that_make_serve_prints() -> None:
    printed = shlex.split(example_request("http://127.0.0.1:8000", TINY_NAME, TINY_QUESTION))
    request = next(shlex.split(command.text) for command in commands(README) if command.text.startswith("curl"))
    assert (request[:-1], json.loads(request[-1])) == (printed[:-1], json.loads(printed[-1]))


def test_every_make_target_is_listed_with_its_meaning() -> None:
    phony = set(re.findall(r"^\.PHONY: ([\w.-]+)", (ROOT / "Makefile").read_text(), re.M))
    assert {line.split()[1] for line in make("-s").stdout.splitlines()} == phony
