"""Reads the documentation as a user would: its pages and their code blocks."""

from __future__ import annotations

import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("patches/**/*.md"), *ROOT.glob("docker/**/*.md")]
)


def code_blocks(page: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of a language, in order, without their indentation. "" is a plain block."""
    blocks, inside, lines = [], None, []
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.strip()
        if inside is None and fence.startswith("```"):
            inside, lines = fence[3:], []
        elif inside is not None and fence == "```":
            if inside == language:
                blocks.append(textwrap.dedent("\n".join(lines) + "\n"))
            inside = None
        else:
            lines.append(line)
    return blocks
