"""The site builds strictly, offline: a dead link, a dead anchor, or a page in no navigation ends the build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.docs.docs_site import in_the_site, pages
from tests.markdown import ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
with_mkdocs = pytest.mark.skipif(not MKDOCS.exists(), reason="MkDocs is not set up; make docs")
SOURCES = ("mkdocs.yml", "docs", "scripts", "CONTRIBUTING.md", "README.md", "README.zh.md", "docker", "patches")
# nothing of the theme is fetched by a reader's browser; its mention at the foot of each page is a link
MENTIONED = {"https://squidfunk.github.io/mkdocs-material/", "http://www.w3.org/2000/svg"}
SITE = {"docs/a.md": "a.md", "docs/deep/b.md": "deep/b.md", "CONTRIBUTING.md": "contributing.md"}


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Without a network: any proxy that is asked is not there."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.docs
@with_mkdocs
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    made = {re.sub(r"README\.md$", "index.md", page).removesuffix(".md") + ".html" for page in pages().values()}
    assert {page for page in made if not (tmp_path / page).is_file()} == set()
    for path in tmp_path.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', text)
        assert set(fetched) <= MENTIONED, path
        article = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"^```|\]\(\w|^\|\s*-{3}", article, re.M), f"{path}: Markdown that nobody understood"


@pytest.mark.docs
@with_mkdocs
def test_a_dead_link_and_a_page_in_no_navigation_end_the_build(tmp_path: Path) -> None:
    for name in SOURCES:
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    for folder in ("tests", "npu_gptoss", "emulator", "research", "requirements"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    index = tmp_path / "docs/index.md"
    dead = ("no-such-page.md", "doctor.md#no-such-heading", "../scripts/no_such.py", "../CONTRIBUTING.md#no-such-part")
    added = "\n".join(f"[x]({target})\n" for target in dead)
    index.write_text(f"{index.read_text(encoding='utf-8')}\n{added}", encoding="utf-8")
    (tmp_path / "docs/forgotten.md").write_text("# In no navigation\n", encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for target in (*dead, "forgotten.md"):
        assert target.rpartition("/")[2].rpartition("#")[2] in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("source", "text", "page"),
    [
        ("docs/deep/b.md", "[x](../../CONTRIBUTING.md#y)", "[x](../contributing.md#y)"),
        ("CONTRIBUTING.md", "[x](docs/a.md)", "[x](a.md)"),
        ("CONTRIBUTING.md", "[中文](README.md)", "[中文](index.md)"),
        ("docs/a.md", "[the tests](../tests/docs)", "the tests (`tests/docs`)"),
        ("docs/a.md", "[x](../nothing.md)", "[x](../nothing.md)"),
        ("docs/a.md", "`[x](../tests/docs)`", "`[x](../tests/docs)`"),
    ],
)
def test_a_link_is_what_the_site_needs(source: str, text: str, page: str, tmp_path: Path) -> None:
    """To a page: the page. To another file: its path, since a site has no repository. To nothing: MkDocs fails."""
    for name in (*SITE, "README.md", "tests/docs/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert in_the_site(text, source, SITE, tmp_path) == page
