"""Generated tables are up to date, and tables of memory follow the doctor's arithmetic."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from npu_gptoss.doctor.memory import CARD, PUBLISHED_20B, PUBLISHED_120B, Cards
from npu_gptoss.model.device_memory import Part, gib, kv_bytes_per_token, thousands
from npu_gptoss.serving.ascend.sizes import most_sizes
from scripts.docs.tables import PAGES, Tables
from scripts.serve_here import serve_command
from tests.markdown import ROOT


@pytest.mark.parametrize("tables", PAGES, ids=lambda tables: tables.page)
def test_a_generated_table_is_up_to_date(tables: Tables) -> None:
    text = (ROOT / tables.page).read_text(encoding="utf-8")
    assert tables.written(text) == text, f"python {tables.script} --write"


def table(page: str, mark: str) -> list[list[str]]:
    """The cells of the first table behind a text, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(mark)[2]
    lines = [line for line in text.partition("\n|")[2].partition("\n\n")[0].splitlines()[2:] if line.startswith("|")]
    assert lines, f"{page} has no table behind {mark!r}"
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    ("page", "config", "cards"),
    [
        ("docs/tutorials/gpt-oss-20b-on-one-910b.md", PUBLISHED_20B, (1,)),
        ("docs/tutorials/gpt-oss-120b-on-4-or-8.md", PUBLISHED_120B, (4, 8)),
    ],
)
def test_the_table_of_memory_is_the_doctors_arithmetic(page: str, config: object, cards: tuple[int, ...]) -> None:
    wanted = []
    for ranks in cards:
        for utilisation in (0.85, 0.9, 0.95, 0.97):
            found = Cards(config, ranks, 16384, CARD).choice(utilisation).expanded
            token = f"{kv_bytes_per_token(config, Part.of(config, ranks)) // 1024} KiB"
            whole = [f"{found.tokens // length}" for length in (16384, 131072)]
            wanted.append([str(utilisation), gib(found.weights), token, thousands(found.tokens), *whole])
            if len(cards) > 1:
                wanted[-1].insert(0, str(ranks))
    assert table(page, "checked by tests/docs/test_generated.py -->") == wanted


def test_the_table_of_sizes_is_vllm_ascends_arithmetic() -> None:
    assert table("docs/tuning.md", "checked by tests/docs/test_generated.py -->") == [
        [name, f"{most_sizes(layers)} sizes", *(str(most_sizes(layers, groups=1, aiv=aiv)) for aiv in (False, True))]
        for name, layers in (("20b", 24), ("120b", 36))
    ]


def test_the_table_of_vllms_options_has_the_scripts_options() -> None:
    rows = table("docs/configuration.md", "## Options of `vllm serve`")
    named = {option: row for row in rows for option in re.findall(r"`(--[\w-]+)`", row[0])}
    dry = ["sh", str(ROOT / "scripts/serve.sh"), "--model", "openai/gpt-oss-20b", "--dry-run"]
    printed = subprocess.run(dry, capture_output=True, text=True, check=True).stdout
    for column, words in ((2, shlex.split(printed)), (3, serve_command(Path("DIR"), "name", "127.0.0.1", 8000, []))):
        for option, value in zip(words, [*words[1:], "--"], strict=True):
            if option.startswith("--") and option != "--served-model-name":
                assert option in named, f"the page lacks {option}"
                if not value.startswith("--") and "{" not in value:
                    assert value in named[option][column], f"{option} {value}"


def test_the_totals_of_features_count_its_rows() -> None:
    text = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| (yes|emulated|partly|no) \|", text, re.M)
    counts = ", ".join(f"{rows.count(word)} {word}" for word in ("yes", "emulated", "partly", "no"))
    assert f"{len(rows)} rows: {counts}." in text
