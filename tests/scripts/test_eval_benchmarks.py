"""The real evalscope asks GSM8K and AIME 2025 of a server with thoughts of a known length; eval.sh's report counts.

The sets are as small as docs/accuracy.md shows them, in the layout of the hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.evalscope_files import write_lines
from tests.scripts.fake_server import Reply, fake_server
from tests.scripts.shell import needs_evalscope, report, run

# evalscope's own; tests/scripts/test_evalscope.py asks MMLU in `make test`
pytestmark = [pytest.mark.evalscope, pytest.mark.slow, pytest.mark.long, needs_evalscope]
SUMS = [(17 * i + 4, 22 * i + 1000) for i in range(12)]
LONG = 600  # tokens of the thought about a sum that 4 does not divide


def thinks(asked: dict[str, Any]) -> Reply:
    """Right always, after a thought that a limit below LONG cuts off where 4 does not divide the sum."""
    first, second = map(int, re.findall(r"What is (\d+) \+ (\d+)\?", asked["messages"][-1]["content"])[-1])
    if (first + second) % 4 and asked.get("max_tokens", LONG) < LONG:
        return "", "length"
    return rf"The sum is \boxed{{{first + second}}}.", "stop"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    rows = [{"question": f"What is {a} + {b}?", "answer": f"Add them.\n#### {a + b:,}"} for a, b in SUMS]
    write_lines(folder / "gsm8k/main/test.jsonl", rows)
    examples = [{**row, "question": f"Ann asks: {row['question']}"} for row in rows[:4]]
    write_lines(folder / "gsm8k/main/train.jsonl", examples)
    files = "".join(f"  - {{split: {split}, path: main/{split}.jsonl}}\n" for split in ("train", "test"))
    (folder / "gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    problems = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS]
    problems[10]["answer"] = str(sum(SUMS[10]) + 1)
    write_lines(folder / "aime25/test.jsonl", problems)
    return folder


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def url(asked: list[dict[str, Any]]) -> Iterator[str]:
    def reply(request: dict[str, Any]) -> Reply:
        asked.append(request)
        return thinks(request)

    with fake_server({"gpt-oss-20b": ""}, reply=reply) as url:
        yield url


def evaluate(url: str, folder: Path, benchmark: str, out: str, *options: str) -> str:
    where = ("--url", url, "--data", folder / benchmark, "--out", folder / out)
    done = run("eval.sh", benchmark, *where, *options, timeout=240, HF_HOME=str(folder / "cache"))
    assert done.returncode == 0
    return done.stdout


def test_a_limit_of_512_tokens_costs_gsm8k_points(url: str, folder: Path, asked: list[dict[str, Any]]) -> None:
    """The same server twice: all is right without a limit, and a quarter with one."""
    whole = evaluate(url, folder, "gsm8k", "whole")
    assert "mean over questions: 100.00 (75.8 to 100.0) %**, 12 right" in whole
    assert len(asked) == 12
    for request in asked:
        assert "max_tokens" not in request
        assert (request["temperature"], request["reasoning_effort"]) == (0, "medium")
        assert request["messages"][-1]["content"].count("Ann asks: What is") == 4, "worked examples"
    cut = evaluate(url, folder, "gsm8k", "cut", "--max-tokens", "512")
    assert "mean over questions: 25.00 (8.9 to 53.2) %**, 3 right" in cut
    assert "9 of 12 replies were cut off" in cut
    assert "between 25.00 and 100.00 %" in cut
    compared = report(folder / "whole", "--against", folder / "cut")
    assert "| **first right** | 3 | 9 |" in compared
    assert "The first run is better" in compared


def test_aime_is_asked_and_a_number_one_off_is_wrong(url: str, folder: Path, asked: list[dict[str, Any]]) -> None:
    """The set's answer to its eleventh problem is one too high."""
    before = len(asked)
    printed = evaluate(url, folder, "aime25", "aime", "--effort", "high")
    assert "# AIME 2025 of gpt-oss-20b" in printed
    assert "mean over questions: 91.67 (64.6 to 98.5) %**, 11 right" in printed
    assert "| vLLM's recipe, gpt_oss.evals at temperature 1 | 85.8 | +5.87 |" in printed
    assert [request["reasoning_effort"] for request in asked[before:]] == ["high"] * 12
