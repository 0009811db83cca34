"""The tutorials' tables of memory are what the doctor computes, and the lines that they quote are what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_gptoss.doctor.memory import (
    CARD,
    PUBLISHED_20B,
    PUBLISHED_120B,
    RESERVE,
    fit,
    gib,
    hccl_bytes,
    kv_bytes_per_token,
    settings,
    thousands,
)
from npu_gptoss.serving.ascend.sizes import most_sizes
from tests.markdown import ROOT

FOLDER = ROOT / "docs/tutorials"
PAGES = {
    "gpt-oss-20b-on-one-910b.md": (PUBLISHED_20B, (1,)),
    "gpt-oss-120b-on-4-or-8.md": (PUBLISHED_120B, (4, 8)),
}
UTILISATIONS = (0.85, 0.9, 0.95, 0.97)


def rows(page: Path) -> list[list[str]]:
    """Of the table behind the comment that names this file, without its head."""
    table = page.read_text(encoding="utf-8").partition("checked by tests/test_tutorials.py -->")[2].strip()
    lines = [line for line in table.partition("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("name", PAGES)
def test_the_table_of_memory_is_the_doctors_arithmetic(name: str) -> None:
    config, cards = PAGES[name]
    wanted = []
    for ranks in cards:
        for utilisation in UTILISATIONS:
            found = fit(config, ranks, 16384, CARD, utilisation, hccl=hccl_bytes(ranks))
            token = f"{kv_bytes_per_token(config, ranks) // 1024} KiB"
            whole = [f"{found.tokens // length}" for length in (16384, 131072)]
            wanted.append([str(utilisation), gib(found.weights), token, thousands(found.tokens), *whole])
            if len(cards) > 1:
                wanted[-1].insert(0, str(ranks))
    assert rows(FOLDER / name) == wanted


def test_another_number_in_the_table_would_be_seen(tmp_path: Path) -> None:
    page = FOLDER / "gpt-oss-20b-on-one-910b.md"
    other = tmp_path / "page.md"
    other.write_text(page.read_text(encoding="utf-8").replace("295 thousand", "296 thousand"), encoding="utf-8")
    assert rows(other) != rows(page)


def test_numbers_of_the_prose_are_those_of_the_code() -> None:
    text = (FOLDER / "gpt-oss-120b-on-4-or-8.md").read_text(encoding="utf-8")
    sizes = [most_sizes(36, groups=1, aiv=aiv) for aiv in (False, True)]
    assert re.search(rf"may capture {sizes[0]} sizes with several\s+cards, {sizes[1]} with AIV", text)
    assert f"`{settings(PUBLISHED_120B, 4, CARD)}`" in text
    assert f"{RESERVE >> 30} GiB for activations and {hccl_bytes(4) / 2**30:.2f} GiB for HCCL" in text
    for page in (text, (FOLDER / "gpt-oss-20b-on-one-910b.md").read_text(encoding="utf-8")):
        assert f"{CARD / 2**30:.2f} GiB" in page
    served = [fit(PUBLISHED_120B, ranks, 0, CARD, 0.95, hccl=hccl_bytes(ranks)).tokens for ranks in (4, 8)]
    assert f"about {served[0] // 1000} 000 tokens on four cards and {thousands(served[1])} on eight" in text
    largest = PUBLISHED_120B.num_local_experts * PUBLISHED_120B.hidden_size * 2 * PUBLISHED_120B.intermediate_size * 2
    assert f"before it expands it: {largest / 1e9:.1f} GB for all processes together" in text
    expected = 32 * (1 - (28 / 32) ** 10)
    assert f"choose {expected:.1f} of 32 experts" in (FOLDER / "gpt-oss-20b-on-one-910b.md").read_text(encoding="utf-8")
