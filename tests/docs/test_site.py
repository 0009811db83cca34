"""The site builds without a warning, alone and offline, and what it shows is no Markdown that nobody understood."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from scripts.docs.docs_site import pages
from tests.markdown import ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"
pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not MKDOCS.exists(), reason="MkDocs is not set up; make docs"),
]
# what the site is made of
SOURCES = (
    "mkdocs.yml",
    "docs",
    "scripts/docs/docs_site.py",
    "CONTRIBUTING.md",
    "README.md",
    "README.zh.md",
    "docker",
    "patches",
)
# nothing of the theme is fetched by a reader's browser; its mention at the foot of each page is a link
MENTIONED = {"https://squidfunk.github.io/mkdocs-material/", "http://www.w3.org/2000/svg"}


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Without a network: any proxy that is asked is not there."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@cache
def article(path: Path) -> str:
    return re.search(r"<article.*?</article>", path.read_text(encoding="utf-8"), re.S)[0]


def shown(path: Path) -> str:
    """The text of a page as a reader sees it, without code."""
    without = re.sub(r"<(pre|code)\b.*?</\1>", "", article(path), flags=re.S)
    return html.unescape(re.sub(r"<[^>]+>", "", without))


def html_of(page: str) -> str:
    return re.sub(r"README\.md$", "index.md", page).removesuffix(".md") + ".html"


def leftovers(text: str) -> list[str]:
    """Lines with Markdown that was not understood: a fence, a row of a table, a list, a link, bold."""
    return [line for line in text.splitlines() if re.search(r"```|\]\(|\|\s*-{3}|^\s*(?:[*-]|\|) \S|\*\*|^#+ ", line)]


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    reached = set(re.findall(r'<a href="([\w./-]+\.html)" class="md-nav__link"', home)) | {"index.html"}
    made = {html_of(page) for page in pages().values()}
    assert {page for page in made if not (site / page).is_file()} == set()
    assert {page for page in made - reached if not re.match(r"patches/[\w-]+/", page)} == set()
    diffs = set(re.findall(r'href="([\w./-]+\.html)"', article(site / "patches/index.html")))
    assert {f"patches/{page}" for page in diffs} >= {page for page in made if re.match(r"patches/[\w-]+/", page)}


def test_nothing_is_left_as_markdown(site: Path) -> None:
    left = {page: leftovers(shown(site / html_of(page))) for page in pages().values()}
    assert {page: lines for page, lines in left.items() if lines} == {}
    assert len(leftovers("* a\n| b | c |\n|---|\n```sh\n[d](e)\n**f**\n## g\n")) == 7


def test_tables_lists_and_code_are_what_the_sources_have(site: Path) -> None:
    for name, page in pages().items():
        source = (ROOT / name).read_text(encoding="utf-8")
        fences = len(re.findall(r"^\s*```+\S*$", source, re.M)) // 2
        made = article(site / html_of(page))
        assert made.count('<div class="highlight">') + made.count('class="highlight"><pre') >= fences, page
        prose = re.sub(r"^\s*```.*?^\s*```$", "", source, flags=re.M | re.S)
        assert made.count("<table>") == len(re.findall(r"^\|[ :|-]+\|$", prose, re.M)), page


def least_width(table: str) -> int:
    """Of a table as HTML, in characters: the longest piece of each column that no browser breaks, and its margins."""
    longest: dict[int, int] = {}
    for row in re.findall(r"<tr>.*?</tr>", table, re.S):
        for column, cell in enumerate(re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", row, re.S)):
            pieces = html.unescape(re.sub(r"<[^>]+>", "", cell.replace("<wbr>", " "))).split()
            longest[column] = max(longest.get(column, 0), *map(len, pieces or [""]))
    return sum(longest.values()) + 3 * len(longest)


def test_no_table_is_wider_than_its_page(site: Path) -> None:
    """A page is 1026 pixels wide (stylesheets/wide.css), a character of code in a table 6.5; or it scrolls."""
    widths = {
        page: max(map(least_width, re.findall(r"<table>.*?</table>", article(site / html_of(page)), re.S)), default=0)
        for page in pages().values()
    }
    assert {page: width for page, width in widths.items() if width > 150} == {}
    with_names_in_one_piece = article(site / "features.html").replace("<wbr>", "")
    tables = re.findall(r"<table>.*?</table>", with_names_in_one_piece, re.S)
    assert max(map(least_width, tables)) > max(widths["features.md"], 130), "names of tests are broken after ::"


def test_no_page_needs_anything_from_elsewhere(site: Path) -> None:
    """Fonts, scripts and pictures come from the site itself."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', text)
        assert set(fetched) <= MENTIONED, path
        assert "fonts.googleapis" not in text


def test_every_page_can_be_searched_by_its_words(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] or "index.html" for entry in index["docs"]}
    assert {html_of(page) for page in pages().values()} - found == set()
    words = " ".join(entry["text"] for entry in index["docs"])
    for word in ("107027", "learnable_sink", "窗口", "NPU_GPTOSS_PLATFORM"):
        assert word in words, word


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return tmp_path


def test_a_whole_copy_builds(copy: Path) -> None:
    """What the next test spoils was right before."""
    done = build(copy, copy / "site")
    assert done.returncode == 0, done.stderr


def test_what_is_dead_or_missing_ends_the_build(copy: Path) -> None:
    """Each mistake is one warning, and a warning ends a strict build."""
    index = copy / "docs/index.md"
    spoilt = [
        "[no such page](no-such-page.md)",
        "[no such heading](doctor.md#no-such-heading)",
        "[no such heading here](#nor-this)",
        "[outside](../scripts/no_such_script.py)",
        "[of a page from outside](../CONTRIBUTING.md#no-such-part)",
    ]
    index.write_text(index.read_text(encoding="utf-8") + "\n\n" + "\n\n".join(spoilt) + "\n", encoding="utf-8")
    (copy / "docs/forgotten.md").write_text("# In no navigation\n", encoding="utf-8")
    configuration = copy / "mkdocs.yml"
    text = configuration.read_text(encoding="utf-8")
    configuration.write_text(text.replace("quickstart.md", "quickstart-that-is-not-there.md"), encoding="utf-8")
    done = build(copy, copy / "site")
    assert done.returncode != 0
    for words in (
        "no-such-page.md",
        "#no-such-heading",
        "#nor-this",
        "no_such_script.py",
        "#no-such-part",
        "forgotten.md",
        "quickstart-that-is-not-there.md",
    ):
        assert re.search(rf"(?:WARNING|- ).*{re.escape(words)}", done.stderr), f"{words}\n{done.stderr}"
    assert done.stderr.count("WARNING") == 7, done.stderr  # the pages in no navigation make one
