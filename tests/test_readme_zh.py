"""README.zh.md says what README.md says: what is no language is compared, so that neither changes alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.markdown import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def prose(text: str) -> str:
    """Without the code blocks, whose places stay, and without the link to the other language."""
    return re.sub(r"\[(?:English|中文)\]\(README(?:\.zh)?\.md\)", "", FENCED.sub("```", text))


def code(text: str) -> list[str]:
    return FENCED.findall(text)


def links(text: str) -> list[str]:
    """Targets with their anchors, in order."""
    return re.findall(r"\]\(([^)]+)\)", prose(text))


def inline_code(text: str) -> Counter[str]:
    """The order of a sentence is the language's own."""
    return Counter(re.findall(r"`([^`\n]+)`", prose(text)))


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:\.\d+)*", prose(text)))


def shape(text: str) -> list[str]:
    """A word for each heading, paragraph, code block and table; tables with their columns, row by row."""
    kinds = []
    for block in filter(None, map(str.strip, prose(text).split("\n\n"))):
        if block.startswith("#"):
            kinds.append("heading " + block.split()[0])
        elif block.startswith("|"):
            kinds.append("table " + " ".join(str(line.count("|")) for line in block.splitlines()))
        else:
            kinds.append("code" if block.startswith("```") else f"paragraph, {block.count('**') // 2} bold")
    return kinds


COMPARED: dict[str, Callable[[str], object]] = {
    "code blocks": code,
    "links": links,
    "commands and names in sentences": inline_code,
    "numbers": numbers,
    "headings, paragraphs, tables": shape,
}


@pytest.mark.parametrize("what", COMPARED)
def test_the_chinese_readme_does_not_drift_from_the_english_one(what: str) -> None:
    english, chinese = (COMPARED[what](page.read_text(encoding="utf-8")) for page in (ENGLISH, CHINESE))
    assert english, "nothing is compared: the pattern is wrong"
    assert chinese == english


@pytest.mark.parametrize(("page", "other"), [(ENGLISH, "[中文](README.zh.md)"), (CHINESE, "[English](README.md)")])
def test_each_readme_leads_to_the_other_in_its_first_lines(page: Path, other: str) -> None:
    assert page.read_text(encoding="utf-8").splitlines()[2] == other


def test_the_chinese_readme_is_chinese() -> None:
    """Each paragraph and each row of a table below the headers; a block left in English would be no translation."""
    blocks = [block for block in prose(CHINESE.read_text(encoding="utf-8")).split("\n\n") if block.strip(" `\n")]
    lines = [line for block in blocks for line in (block.splitlines() if block.startswith("|") else [block])]
    untranslated = [
        line
        for line in lines
        if not re.search(r"[一-鿿]", line) and not re.fullmatch(r"[|\-]+|# npu-gptoss", line.strip())
    ]
    assert untranslated == []


@pytest.mark.parametrize(
    ("what", "before", "after"),
    [
        ("code blocks", "make test\n", "make tests\n"),
        ("links", "docs/running-on-910b.md#what-only-a-910b-can-show", "docs/running-on-910b.md"),
        ("commands and names in sentences", "`make test-cuda`", "`make test`"),
        ("numbers", "42 GB", "24 GB"),
        ("headings, paragraphs, tables", "**never run on**", "never run on"),
        ("headings, paragraphs, tables", "Licence:", "One more paragraph.\n\nLicence:"),
        ("headings, paragraphs, tables", "\n| CUDA,", "\n| a | b | c | d | e |\n| CUDA,"),
    ],
)
def test_a_change_of_the_english_readme_alone_is_found(what: str, before: str, after: str) -> None:
    english = ENGLISH.read_text(encoding="utf-8")
    assert before in english
    assert COMPARED[what](english.replace(before, after, 1)) != COMPARED[what](english)
