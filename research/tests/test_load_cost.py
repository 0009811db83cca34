"""The table of what loading costs the host: a rank of four pays its share, not the whole."""

from __future__ import annotations

import subprocess
import sys

from tests.markdown import ROOT


def test_a_rank_of_four_pays_for_its_share_and_a_rank_alone_for_the_whole() -> None:
    command = [sys.executable, str(ROOT / "research/load_cost.py"), "--experts", "4", "--ranks", "1", "4"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["1", "whole"], ["4", "cut"], ["4", "dealt out"]]
    alone, cut, dealt = [(float(row[4]), float(row[5])) for row in rows]
    assert alone == (1, 1)
    assert max(cut) < 0.6  # 0.27 and 0.29 on an idle core, of 32 experts
    assert dealt[0] < 0.6  # its peak is one expert above its share, and four experts are few
