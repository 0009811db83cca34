"""Reads pages like a user: blocks of code, commands, names between backticks."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "patches/*.md", "docker/*.md", "emulator/*.md")
    for page in ROOT.glob(pattern)
)  # fmt: skip
FENCED = re.compile(r"^[ ]*```(?P<language>\S*)\n(?P<body>.*?)^[ ]*```[ ]*$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is the number of its first inner line."""

    language: str
    line: int
    text: str


@dataclass(frozen=True)
class Command:
    """A command in a block of `sh`, with the lines that a backslash appends. `page`: path in the repository."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found["language"], text.count("\n", 0, found.start("body")) + 1, textwrap.dedent(found["body"]))
        for found in FENCED.finditer(text)
    ]


def code_blocks(page: Path, language: str) -> list[str]:
    """The contents of the fenced blocks of a language, in order. "" is a plain block."""
    return [block.text for block in blocks(page) if block.language == language]


def unseen(block: str, printed: str) -> list[str]:
    """Lines of a page's block that were not printed; "…" stands for any text, a line "…" for any lines."""
    said = [" ".join(line.split()) for line in printed.splitlines()]

    def like(line: str) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, " ".join(line.split()).split("…"))))

    return [line for line in block.splitlines() if line.strip("… ") and not any(map(like(line).fullmatch, said))]


def commands(page: Path) -> list[Command]:
    found = []
    for block in blocks(page):
        if block.language == "sh":
            joined = block.text.replace("\\\n", "\0").splitlines()  # joins a command of several lines
            line = block.line
            for text in joined:
                if text.strip() and not text.startswith("#"):
                    found.append(Command(name_of(page), line, re.sub(r"\0\s*", "", text)))
                line += 1 + text.count("\0")
    return found


def spans(page: Path) -> list[str]:
    """Texts between backticks in sentences and tables."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(span.split()).replace("\\|", "|") for span in re.findall(r"`((?:[^`\n]|\n(?!\s*\n))+)`", prose)]


ALL_COMMANDS = [command for page in PAGES for command in commands(page)]
