"""Rows that belong together, noise, warnings, and files that are never compared."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.bench import compare
from npu_gptoss.bench.compare import DEFAULT, FASTER, SLOWER, SMALLEST, WITHIN_NOISE
from npu_gptoss.cli import main
from npu_gptoss.errors import InputError

ROOT = Path(__file__).parents[2]


def decode_row(tpot_ms: float, half: float | None = 0.02, **changes: object) -> dict[str, object]:
    """half: of the band from a tenth to nine tenths, as a share of the mean; None: the record has none."""
    row = {"model": "20b", "weights": "mxfp4", "layout": "tp1", "batch": 8, "context": 1024}
    row["tpot_ms"] = tpot_ms
    if half is not None:
        row |= {"tpot_p10_ms": tpot_ms * (1 - half), "tpot_p90_ms": tpot_ms * (1 + half)}
    return {**row, **changes}


def content(*rows: dict[str, object], what: str = "decode", **changes: object) -> dict[str, Any]:
    header = {"what": what, "engine": "npu_gptoss", "date": "2026-11-22", "definitions": {"tpot_ms": "mean"}}
    header |= {"machine": {"device": "NVIDIA H200", "driver": "570"}, "versions": {"torch": "2.11.0"}}
    return {**header, "records": list(rows), **changes}


def printed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return compare.table(old, new, compare.compare(old, new))


def only_row(old: dict[str, object], new: dict[str, object], what: str = "decode") -> compare.Row:
    (row,) = compare.compare(content(old, what=what), content(new, what=what))
    return row


@pytest.mark.parametrize(
    ("new", "half", "verdict"),
    [
        (2.05, 0.02, WITHIN_NOISE),
        (2.07, 0.02, SLOWER),
        (1.946, 0.02, WITHIN_NOISE),
        (1.944, 0.02, FASTER),
        (2.015, 0.0001, WITHIN_NOISE),
        (2.021, 0.0001, SLOWER),
    ],
)
def test_band_comes_from_both_spreads_and_never_below_the_smallest(new, half, verdict):
    """Two per cent in each add to 2.83, up and, as a ratio, down."""
    row = only_row(decode_row(2.0, half), decode_row(new, half))
    assert row.band == pytest.approx(max(SMALLEST, math.hypot(half, half)))
    assert row.ratio == pytest.approx(new / 2.0)
    assert row.verdict == verdict
    assert not row.assumed


@pytest.mark.parametrize("pair", [(None, 0.02), (0.02, None), (None, None)])
def test_a_record_without_a_spread_gets_the_default_and_says_so(pair):
    row = only_row(*(decode_row(2.0, half) for half in pair))
    assert row.band == DEFAULT
    assert row.assumed
    lines = printed(content(decode_row(2.0, pair[0])), content(decode_row(2.0, pair[1])))
    assert "* a record has no spread: 5% is assumed" in lines
    assert any("±5.0%*" in line for line in lines)


def prefill_row(seconds: float, half: float, repeats: int) -> dict[str, object]:
    spread = {"prefill_min_s": seconds * (1 - half), "prefill_max_s": seconds * (1 + half), "repeats": repeats}
    return {"model": "20b", "weights": "mxfp4", "prompt_tokens": 8192, "prefill_s": seconds, **spread}


def kernel_row(us: float, spread: float) -> dict[str, object]:
    case = {"operation": "moe.experts", "kernel": "triton", "case": "8", "samples": 10}
    return {**case, "us": us, "spread": spread}


@pytest.mark.parametrize(
    ("what", "old", "new", "band"),
    [
        ("prefill", prefill_row(1.0, 0.04, 3), prefill_row(1.1, 0.03, 3), 0.05),
        ("prefill", prefill_row(1.0, 0.0, 1), prefill_row(1.1, 0.03, 3), None),  # a single repeat is no spread
        ("kernel", kernel_row(10.0, 0.06), kernel_row(10.6, 0.08), 0.05),
    ],
)
def test_spread_of_each_kind_is_half_of_its_range(what, old, new, band):
    row = only_row(old, new, what)
    assert row.assumed == (band is None)
    assert row.band == pytest.approx(band or DEFAULT)
    assert row.verdict == SLOWER


def test_rows_belong_together_by_all_that_tells_them_apart():
    changes = [{"batch": 1}, {"context": 8192}, {"model": "120b"}, {"weights": "bf16"}]
    changes.append({"layout": "tp2"})
    old = content(decode_row(1.0), *(decode_row(2.0 + n, **change) for n, change in enumerate(changes)))
    new = content(*(decode_row(2.0 + n, **change) for n, change in enumerate(changes)), decode_row(9.0, batch=64))
    found = compare.compare(old, new)
    assert [row.ratio for row in found] == [1.0] * len(changes)
    lines = printed(old, new)
    assert "only in the old file: 20b mxfp4 tp1 8 1024" in lines
    assert "only in the new file: 20b mxfp4 tp1 64 1024" in lines


def test_a_file_from_before_layouts_is_of_one_gpu():
    early = decode_row(2.0)
    del early["layout"]
    assert only_row(early, decode_row(2.0)).ratio == 1.0


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({"machine": {"device": "NVIDIA H100", "driver": "570"}}, "device: NVIDIA H200, then NVIDIA H100"),
        ({"versions": {"torch": "2.12.0"}}, "torch: 2.11.0, then 2.12.0"),
        ({"engine": "vLLM 0.25.1"}, "engine: npu_gptoss, then vLLM 0.25.1"),
        ({"machine": {"device": "NVIDIA H200"}}, "driver: 570, then not there"),
        ({"environment": {"NPU_GPTOSS_KERNEL_MOE_EXPERTS": "x"}}, "NPU_GPTOSS_KERNEL_MOE_EXPERTS: not there, then x"),
        ({"definitions": {"tpot_ms": "median"}}, "the definitions of tpot_ms differ: read both"),
    ],
)
def test_other_differences_are_warnings(change, warning):
    lines = printed(content(decode_row(2.0)), content(decode_row(2.0), **change))
    assert lines[0].startswith(f"warning: {warning}")
    assert not lines[1].startswith("warning")
    for same in (content(decode_row(2.0)), content(decode_row(2.0), environment={})):
        assert "warning" not in "".join(printed(content(decode_row(2.0)), same))


def test_files_of_different_measurements_are_refused():
    prefill = content(prefill_row(1.0, 0.01, 3), what="prefill")
    with pytest.raises(InputError, match="records of decode and of prefill measure different things"):
        compare.compare(content(decode_row(1.0)), prefill)
    with pytest.raises(InputError, match="no record of decode in common"):
        compare.compare(content(decode_row(1.0)), content(decode_row(1.0, batch=1)))


# -- the command, on committed records


COMMITTED = ROOT / "docs" / "benchmarks" / "h200_decode_20b.json"


def test_file_against_itself_is_within_noise_and_a_slower_row_fails(tmp_path, capsys):
    assert main(["bench", "compare", str(COMMITTED), str(COMMITTED), "--fail-on-slower"]) == 0
    assert "0 slower, 0 faster" in capsys.readouterr().out
    worse = json.loads(COMMITTED.read_text())
    worse["records"][2]["tpot_ms"] *= 1.5
    file = tmp_path / "worse.json"
    file.write_text(json.dumps(worse))
    assert main(["bench", "compare", str(COMMITTED), str(file), "--fail-on-slower"]) == 1
    out = capsys.readouterr().out
    assert "1 slower" in out
    assert "1.500" in out
    assert main(["bench", "compare", str(COMMITTED), str(file)]) == 0, "without the flag it only tells"
    assert main(["bench", "compare", str(file), str(COMMITTED), "--fail-on-slower"]) == 0, "faster is no failure"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON in UTF-8"),
        ('{"what": "decode", "what": "kernel"}', "is there twice in one object"),
        ("[]", "expected an object with records"),
        ('{"what": "speed"}', "records of decode, prefill"),
        ('{"what": "decode", "engine": "x", "records": []}', "machine, versions, date missing"),
        ('{"what": "decode", "engine": "x", "machine": "x", "versions": {}, "date": "x"}', "machine, records missing"),
    ],
)
def test_file_without_records_is_refused(text, message, tmp_path, capsys):
    file = tmp_path / "bad.json"
    file.write_text(text)
    assert main(["bench", "compare", str(COMMITTED), str(file)]) == 2
    assert message in capsys.readouterr().err
