"""Links of all pages lead somewhere: to a file of the repository, to a heading of a page, to an address.

Here the pages are taken as they stand in the repository; tests/docs/test_site.py has the site's own links checked by
MkDocs. Nothing is asked over the network.
"""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

import pytest

from scripts.docs.docs_site import CODE, in_the_site, is_external, links, resolved
from tests.markdown import PAGES, ROOT

SITE = {"docs/a.md": "a.md", "docs/deep/b.md": "deep/b.md", "CONTRIBUTING.md": "contributing.md"}


def anchors(text: str) -> set[str]:
    """Those of a page's headings, as code hosts and the site make them: a repeated one gets a number."""
    found: dict[str, int] = {}
    made = set()
    prose = re.sub(CODE, lambda match: "" if match["fence"] else match[0], text, flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+?)\s*#*$", prose, re.M):
        plain = re.sub(r"`|\*|\[([^]]*)\]\([^)]*\)", lambda match: match[1] or "", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        made.add(f"{slug}_{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return made


def dead(text: str, source: str) -> list[str]:
    """What is wrong with the links of a page, by line."""
    wrong = []
    for line, target in links(text):
        if is_external(target):
            if reason := _wrong_address(target):
                wrong.append(f"{source}:{line}: {target}: {reason}")
            continue
        where, anchor = resolved(target, source)
        path = ROOT / where
        if where != source and not path.exists():
            wrong.append(f"{source}:{line}: {target}: there is no {where}")
        elif anchor and path.suffix == ".md":
            there = text if where == source else path.read_text(encoding="utf-8")
            if urllib.parse.unquote(anchor[1:]) not in anchors(there):
                wrong.append(f"{source}:{line}: {target}: {where} has no heading for {anchor}")
    return wrong


def _wrong_address(target: str) -> str | None:
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "mailto":
        return None
    if parts.scheme != "https":
        return "an address outside begins with https://"
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*\.[a-z]{2,}", parts.hostname or ""):
        return f"{parts.hostname!r} is no host"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_a_heading_or_an_address(page: Path) -> None:
    assert dead(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix()) == []


def test_the_pages_have_links_of_every_kind() -> None:
    targets = [target for page in PAGES for _, target in links(page.read_text(encoding="utf-8"))]
    assert len(targets) > 150
    assert any(is_external(target) for target in targets)
    assert any(target.startswith("#") for target in targets)
    assert any("#" in target and not target.startswith("#") and not is_external(target) for target in targets)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[x](nothing.md)", "docs/page.md:1: nothing.md: there is no docs/nothing.md"),
        ("\n\n[x](../tests/no_such.py)", "docs/page.md:3: ../tests/no_such.py: there is no tests/no_such.py"),
        ("[x](doctor.md#no-such-heading)", "docs/doctor.md has no heading for #no-such-heading"),
        ("# Here\n\n[x](#there)", "docs/page.md has no heading for #there"),
        ("[x](http://example.com/)", "begins with https://"),
        ("[x](https://localhost/)", "'localhost' is no host"),
        ("[`x`](nothing.md)", "there is no docs/nothing.md"),
    ],
)
def test_a_dead_link_is_told(text: str, wrong: str) -> None:
    assert wrong in " ".join(dead(text, "docs/page.md"))


@pytest.mark.parametrize(
    "text",
    [
        "# A b, `c-d`!\n\n[x](#a-b-c-d)",
        "[x](doctor.md#the-supported-window)",
        "[x](../docker)",
        "`[x](nothing.md)`",
        "```\n[x](nothing.md)\n```",
        "[x](https://example.com/a?b#c)",
    ],
)
def test_what_is_there_is_taken(text: str) -> None:
    assert dead(text, "docs/page.md") == []


@pytest.mark.parametrize(
    ("source", "text", "page"),
    [
        ("docs/a.md", "[x](deep/b.md#y)", "[x](deep/b.md#y)"),
        ("docs/deep/b.md", "[x](../a.md)", "[x](../a.md)"),
        ("docs/deep/b.md", "[x](../../CONTRIBUTING.md#y)", "[x](../contributing.md#y)"),
        ("CONTRIBUTING.md", "[x](docs/a.md)", "[x](a.md)"),
        ("CONTRIBUTING.md", "[中文](README.md)", "[中文](index.md)"),
        ("docs/a.md", "[the tests](../tests/docs)", "the tests (`tests/docs`)"),
        ("docs/a.md", "[`tests/docs`](../tests/docs)", "`tests/docs`"),
        ("docs/a.md", "[x](../nothing.md)", "[x](../nothing.md)"),
        ("docs/a.md", "[x](https://example.com)", "[x](https://example.com)"),
        ("docs/a.md", "`[x](../tests/docs)`", "`[x](../tests/docs)`"),
    ],
)
def test_a_link_is_what_the_site_needs(source: str, text: str, page: str, tmp_path: Path) -> None:
    """To a page: the page. To another file: its path, since a site has no repository. To nothing: MkDocs fails."""
    for name in (*SITE, "README.md", "tests/docs/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert in_the_site(text, source, SITE, tmp_path) == page
