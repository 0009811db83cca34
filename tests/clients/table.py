"""The table of docs/use-it-from.md, client by release of vLLM, from the results of `make test-clients`:

python -m tests.clients.table outputs/clients.xml --write

Without --write it is printed. A cell says yes where all tests passed; CANNOT of test_clients.py is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from npu_gptoss.files import write_atomically
from scripts.docs.tables import Tables
from scripts.setup.environments import CLIENTS, REQUIREMENTS, ROOT, read_pins

PAGE = "docs/use-it-from.md"
SCRIPT = "tests.clients.table"
RELEASES = ("0.11", "0.23", "0.33")
CHAT, RESPONSES, MESSAGES = "chat", "Responses", "Messages"
# client by its name in the results: how it is called, its package, the APIs that it is tested with
AGENTS = {
    "codex": ("Codex", "@openai/codex", (RESPONSES,)),
    "claude_code": ("Claude Code", "@anthropic-ai/claude-code", (MESSAGES,)),
    "opencode": ("OpenCode", "opencode-linux-x64-baseline", (CHAT, RESPONSES, MESSAGES)),
}
PYTHON = {
    "openai_sdk": ("openai", (CHAT, RESPONSES)),
    "anthropic_sdk": ("anthropic", (MESSAGES,)),
    "openai_agents": ("openai-agents", (CHAT, RESPONSES)),
    "langchain_sdk": ("langchain-openai", (CHAT, RESPONSES)),
    "pydantic_ai_sdk": ("pydantic-ai-slim", (CHAT, RESPONSES)),
    "litellm_sdk": ("litellm", (CHAT, RESPONSES)),
    "instructor_sdk": ("instructor", (CHAT, RESPONSES)),
}

Results = Mapping[tuple[str, str], list[bool]]  # client of the results, release -> passed, test by test


def read(junit: Path) -> Results:
    """The results of pytest's junit file. Skipped tests and expected failures are left out."""
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for test in ElementTree.parse(junit).iter("testcase"):
        said = {item.get("name"): item.get("value") for item in test.iter("property")}
        if "client" in said and test.find("skipped") is None:
            failed = test.find("failure") is not None or test.find("error") is not None
            found[said["client"], said["release"]].append(not failed)
    return found


def rows() -> list[tuple[str, str, tuple[str, ...]]]:
    """Client of the results, how the table calls it, and its APIs."""
    agents = json.loads((ROOT / "tests/clients/agents/package.json").read_text())
    versions = agents["dependencies"] | agents["optionalDependencies"]
    found = [(name, f"{title} {versions[package]}", apis) for name, (title, package, apis) in AGENTS.items()]
    pins = {year: read_pins(REQUIREMENTS / f"clients-{year}.txt") for year in CLIENTS}
    for name, (package, apis) in PYTHON.items():
        found += [
            (f"{name} {year}", f"{package} {pins[year][package]}", apis)
            for year in reversed(pins)
            if package in pins[year]
        ]
    for year in reversed(CLIENTS):
        packages = json.loads((ROOT / f"tests/clients/js/{year}/package.json").read_text())["dependencies"]
        title = f"openai {packages['openai']}, @openai/agents {packages['@openai/agents']} (JavaScript)"
        found.append((f"javascript {year}", title, (CHAT, RESPONSES)))
    return found


def cell(passed: Sequence[bool]) -> str:
    if not passed:
        return "not run"
    return "yes" if all(passed) else f"{sum(passed)} of {len(passed)}"


def table(results: Results) -> str:
    heads = ["client", "API", *(f"vLLM {release}" for release in RELEASES)]
    lines = [heads, ["---"] * len(heads)]
    for name, title, apis in rows():
        cells = [cell(results.get((name, release), ())) for release in RELEASES]
        lines.append([title, ", ".join(apis), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="pytest's junit file")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE}")
    options = parser.parse_args(arguments)
    made = table(read(options.results))
    if options.write:
        page = ROOT / PAGE
        tables = Tables(PAGE, {"clients": lambda: made}, SCRIPT)
        write_atomically(page, tables.written(page.read_text(encoding="utf-8")).encode())
    else:
        print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
