"""The shell commands of the pages, each with its place and with what the reader is told that it needs.

A command is a line of a fenced block marked `sh`; lines that end in a backslash go on. What it needs stands where the
reader looks: in a comment behind it, in a comment line above it within the block, or in the paragraph above the block.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.markdown import PAGES, ROOT

# what a reader may lack: its name in the registry, and the words of the pages
NEEDS = {
    "a 910B": r"needs (?:a|an Ascend|\w+) 910Bs?\b",
    "an NVIDIA GPU": r"needs (?:an|\w+) NVIDIA GPUs?\b",
    "Docker": r"needs Docker\b",
    "the network": r"needs the network\b",
    "a server": r"needs a server\b",
    "hours": r"needs (?:\w+ )?hours\b",
}
# a line that begins with one of these is a command, wherever it stands
PROGRAMS = (
    *("npu-gptoss", "make", "python", "python3", "pip", "vllm", "torchrun", "docker", "curl", "git", "bash", "sh"),
    *("cd", "export", "source", "mkdir", "cat", "npu-smi", "evalscope", "sudo", "apt", "wget", "huggingface-cli", "hf"),
)
COMMAND = re.compile(
    rf"^(?:[A-Z][A-Z0-9_]*=\S+ )*(?:(?:\./)?(?:scripts|docker|\.venv[\w-]*)/\S+|(?:{'|'.join(PROGRAMS)})(?= |$))"
)


@dataclass(frozen=True)
class Command:
    """`page`: path in the repository. `text`: as it stands, on one line, without comments. `needs`: names of NEEDS."""

    page: str
    line: int
    text: str
    needs: frozenset[str]

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first inner line, its lines, and the paragraph above it."""

    language: str
    first: int
    lines: tuple[str, ...]
    above: str


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page, their common indentation taken away."""
    lines, number = text.splitlines(), 0
    while number < len(lines):
        fence = re.match(r"\s*(```+)\s*(\S*)", lines[number])
        if not fence:
            number += 1
            continue
        above = number
        while above > 0 and not lines[above - 1].strip():
            above -= 1
        paragraph = above
        while paragraph > 0 and lines[paragraph - 1].strip() and not lines[paragraph - 1].lstrip().startswith("```"):
            paragraph -= 1
        end = number + 1
        while end < len(lines) and lines[end].strip() != fence[1]:
            end += 1
        inner = textwrap.dedent("\n".join(lines[number + 1 : end])).split("\n") if end > number + 1 else []
        yield Block(fence[2], number + 2, tuple(inner), " ".join(lines[paragraph:above]))
        number = end + 1


def needs(text: str) -> frozenset[str]:
    plain = " ".join(text.split())
    return frozenset(name for name, words in NEEDS.items() if re.search(words, plain, re.I))


def split_comment(line: str) -> tuple[str, str]:
    """(command, comment) of a line of shell; a # within quotes or within a word begins no comment."""
    quote = ""
    for index, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index].rstrip(), line[index + 1 :]
    return line.rstrip(), ""


def commands_of(block: Block, page: str) -> Iterator[Command]:
    told, number = needs(block.above), 0
    while number < len(block.lines):
        begin, line = number, block.lines[number]
        while split_comment(line)[0].endswith("\\") and number + 1 < len(block.lines):
            number += 1
            line = split_comment(line)[0][:-1].rstrip() + " " + block.lines[number].strip()
        command, comment = split_comment(line)
        if command:
            yield Command(page, block.first + begin, command.strip(), told | needs(comment))
        else:
            told |= needs(comment)
        number += 1


def commands(text: str, page: str) -> list[Command]:
    """All commands of a page's blocks of shell, in order."""
    return [command for block in blocks(text) if block.language == "sh" for command in commands_of(block, page)]


def unmarked(text: str) -> list[tuple[int, str]]:
    """(line, text) of what looks like a command and stands in no block of shell: nobody would check it."""
    found = []
    inside: set[int] = set()
    for block in blocks(text):
        numbers = range(block.first - 1, block.first + len(block.lines) + 1)
        inside.update(numbers)
        if block.language in ("bash", "shell", "console", "zsh", "shell-session"):
            found.append((block.first - 1, f"```{block.language}"))
        if block.language == "":  # `text` says that it is output
            found += [
                (block.first + offset, line)
                for offset, line in enumerate(block.lines)
                if COMMAND.match(line.strip().removeprefix("$ "))
            ]
    for number, line in enumerate(text.splitlines(), 1):
        if number not in inside and re.match(r" {4,}|\t", line) and COMMAND.match(line.strip().removeprefix("$ ")):
            found.append((number, line))  # a block by indentation
    return found


def spans(text: str) -> list[tuple[int, str]]:
    """(line, text) of what stands between backticks in sentences and tables, on one line."""
    prose = text
    for fence in re.finditer(r"^[ ]*```.*?^[ ]*```[ ]*$", text, re.M | re.S):
        prose = prose.replace(fence[0], "\n" * fence[0].count("\n"), 1)
    found = re.finditer(r"`((?:[^`\n]|\n(?!\s*\n))+)`", prose)
    return [(prose.count("\n", 0, span.start()) + 1, " ".join(span[1].split()).replace("\\|", "|")) for span in found]


def inline(text: str) -> list[tuple[int, str]]:
    """(line, text) of the commands among them."""
    return [(line, span) for line, span in spans(text) if " " in span and COMMAND.match(span)]


def options(text: str) -> list[tuple[int, str]]:
    """(line, option) of each long option among them."""
    return [(line, word) for line, span in spans(text) for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)]


def all_commands() -> list[Command]:
    return [
        command
        for path in PAGES
        for command in commands(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    ]
