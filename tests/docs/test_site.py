"""The site builds strictly, offline: a dead link, a dead anchor, or a page in no navigation ends the build."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.docs.docs_site import in_the_site, pages
from tests.markdown import ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
# a reader's browser fetches nothing of the theme; its mention at the foot of each page is a link
MENTIONED = {"https://squidfunk.github.io/mkdocs-material/", "http://www.w3.org/2000/svg"}
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
SITE = {"docs/a.md": "a.md", "docs/deep/b.md": "deep/b.md", **OUTSIDE}


@pytest.mark.docs
@pytest.mark.skipif(not MKDOCS.exists(), reason="MkDocs is not set up; make docs")
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")  # no network
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made = {re.sub(r"README\.md$", "index.md", page).removesuffix(".md") + ".html" for page in pages().values()}
    assert {page for page in made if not (tmp_path / page).is_file()} == set()
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', text)
        assert set(fetched) <= MENTIONED, path
        article = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"^```|\]\(\w|^\|\s*-{3}", article, re.M), f"{path}: unread Markdown"


@pytest.mark.parametrize(
    ("source", "text", "page"),
    [
        ("docs/deep/b.md", "[x](../../CONTRIBUTING.md#y)", "[x](../contributing.md#y)"),
        ("CONTRIBUTING.md", "[x](docs/a.md)", "[x](a.md)"),
        ("CONTRIBUTING.md", "[中文](README.md)", "[中文](index.md)"),
        ("docs/a.md", "[the tests](../tests/docs)", "the tests (`tests/docs`)"),
        ("docs/a.md", "[x](../nothing.md)", "[x](../nothing.md)"),  # on which MkDocs fails
        ("docs/a.md", "`[x](../tests/docs)`", "`[x](../tests/docs)`"),
    ],
)
def test_a_link_leads_to_a_page_or_names_a_file(source: str, text: str, page: str, tmp_path: Path) -> None:
    for name in (*SITE, "tests/docs/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert in_the_site(text, source, SITE, tmp_path) == page
