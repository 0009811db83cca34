"""The bytes that a card read stand beside those that the roofline counts, step by step, or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.bench.roofline import decode_work
from research.dram_bytes import METRIC, STEPS, main, replays, table
from tests.markdown import ROOT

HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
RECORDS = [{"batch": 1, "distinct_experts": 4.0, "bytes": 3_738_000_000}]


def log(*counts: int, kernel: str = "graph") -> str:
    """As ncu writes it, its own lines around it."""
    rows = [f'"{i}","9","{kernel}","{METRIC}","byte","{count:,}"' for i, count in enumerate(counts)]
    return "\n".join(["==PROF== Connected to process 9", HEAD, *rows])


def test_each_point_gets_the_replays_of_its_own_steps() -> None:
    read = replays(log(*range(3_000_000_000, 3_000_000_000 + STEPS)))
    assert len(read) == STEPS
    assert "| 1 | 4.0 | 3.738 | 3.000 | 3.000 to 3.000 |" in table(RECORDS, read)
    both = table([*RECORDS, {**RECORDS[0], "batch": 8}], [3_000_000_000] * STEPS + [9_000_000_000] * STEPS)
    assert both[-1].endswith("| 9.000 | 9.000 to 9.000 |")


@pytest.mark.parametrize("text", [log(*[1] * (STEPS - 1)), log(*[1] * (STEPS + 1)), log(*[1] * STEPS, kernel="place")])
def test_a_step_that_was_not_one_replay_is_no_measurement(text: str) -> None:
    """Without graphs ncu counts kernels one by one, and a mean of those is nobody's step."""
    with pytest.raises(ValueError, match="expected 8 replays for each of 1 points"):
        table(RECORDS, replays(text))


NCU = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
assert words[:2] == ["--profile-from-start", "off"] and words[words.index("--batch") + 1] == "1", words
pathlib.Path(words[words.index("--log-file") + 1]).write_text({log!r})
pathlib.Path(words[words.index("--in-ncu") + 1]).write_text(json.dumps({{"records": {records!r}}}))
"""


def test_ncu_gets_this_script_and_its_files_become_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "ncu"
    program.write_text(NCU.format(python=sys.executable, log=log(*[3_742_000_000] * STEPS), records=RECORDS))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--batch", "1"]) == 0
    assert "| 1 | 4.0 | 3.738 | 3.742 | 3.742 to 3.742 |" in capsys.readouterr().out


def test_the_page_counts_what_the_roofline_counts_and_the_card_read_that() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = page.partition("by research/tests/test_dram_bytes.py -->")[2].split("\n\n")[1].splitlines()[2:]
    config = full_config("20b")
    assert len(rows) == 2
    for row in rows:
        batch, experts, counted, read, _ = (cell.strip() for cell in row.strip("|").split("|"))
        keys = [1033] * int(batch)  # 1 024 of the prompt and those of the steps before the one in the middle
        work = decode_work(config, keys, "mxfp4", [float(experts)] * config.num_hidden_layers)
        assert float(counted) == pytest.approx(work.bytes / 1e9, rel=2e-4)
        assert float(read) == pytest.approx(float(counted), rel=0.01)
    every = decode_work(config, [1033], "mxfp4", [config.num_local_experts] * config.num_hidden_layers)
    assert f"All 32 experts of every layer would be {every.bytes / 1e9:.1f} GB" in page
