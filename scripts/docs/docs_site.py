"""MkDocs' hook (mkdocs.yml): adds pages outside of docs/ to the site, and rewrites links that leave it.

Readers also read these pages in the repository, so their links are relative to the file. In the site a link to another
page becomes a link to that page; a link to another file of the repository becomes the file's path, as code. A link to
a missing file stays, and MkDocs fails on it.

Imports the standard library only, because tests use it without MkDocs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# a file of the repository -> its page; all of docs/ are pages by themselves
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.zh.md": "zh.md",
    "docker/README.md": "docker.md",
    "patches/README.md": "patches/README.md",
}

CODE = r"(?P<fence>^[ ]*```.*?^[ ]*```[ ]*$)|(?P<span>`(?:[^`\n]|\n(?!\s*\n))+`)"
LINK = r"(?P<image>!?)\[(?P<text>(?:`[^`\n]*`|[^\[\]`])*)\]\((?P<target>[^()\s]+)\)"
TOKEN = re.compile(f"{CODE}|{LINK}", re.M | re.S)


def links(markdown: str) -> list[tuple[int, str]]:
    """(line, target) of each link and image of a text; code is left out."""
    return [
        (markdown.count("\n", 0, match.start()) + 1, match["target"])
        for match in TOKEN.finditer(markdown)
        if match["target"]
    ]


def is_external(target: str) -> bool:
    return "://" in target or target.startswith("mailto:")


def pages(root: Path = ROOT) -> dict[str, str]:
    """Each page of the site by its path in the repository: its path in the site's sources."""
    inside = {f"docs/{path.relative_to(root / 'docs').as_posix()}" for path in (root / "docs").rglob("*.md")}
    return {name: name.removeprefix("docs/") for name in inside} | OUTSIDE


def resolved(target: str, source: str) -> tuple[str, str]:
    """(path in the repository, "#anchor" or "") of a link in the file `source`."""
    path, mark, anchor = target.partition("#")
    where = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
    return where, mark + anchor


def in_the_site(markdown: str, source: str, site: Mapping[str, str], root: Path = ROOT) -> str:
    """The text of the page `source`, a path in the repository, with its links as the site needs them."""
    here = posixpath.dirname(site[source])

    def replace(match: re.Match[str]) -> str:
        whole, text, target = match[0], match["text"], match["target"]
        if not target or is_external(target) or target.startswith("#"):
            return whole
        where, anchor = resolved(target, source)
        if not (root / where).exists():
            return whole
        page = site.get(where) or site.get(f"{where}/README.md")
        if page or where.startswith("docs/"):
            page = page or where.removeprefix("docs/")
            return f"{match['image']}[{text}]({posixpath.relpath(page, here or '.')}{anchor})"
        path = f"`{where}`"
        return path if text.strip("`") == where else f"{text} ({path})"

    return TOKEN.sub(replace, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, page in pages().items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    site = pages()
    (source,) = (name for name, uri in site.items() if uri == page.file.src_uri)
    return in_the_site(markdown, source, site)


def breakable(html: str) -> str:
    """The HTML of a page in which names of tests within tables may be broken after `::`, or some tables never fit."""
    cells = re.compile(r"<td\b.*?</td>", re.S)
    return cells.sub(lambda cell: re.sub(r"(<code>[^<]*?::)(?=\w)", r"\1<wbr>", cell[0]), html)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return breakable(html)
