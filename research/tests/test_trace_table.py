"""What the table of docs/performance.md claims of ours, asserted on fresh traces of the emulated 910B."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ascend_emulator import stacks
from ascend_emulator.launch import EmulationError, find_venv

from npu_gptoss.moe import mxfp4
from research import trace_table
from research.trace_table import (
    PIECEWISE,
    WAYS,
    Counts,
    mean,
    number,
    over_roofline,
    read_trace,
    trace,
)

REGIONS = ("attention", "experts", "layer")
BATCHES = (1, 8)
TOLERATED = 1.05  # bytes over the roofline's

Measured = Mapping[str, Mapping[int, Mapping[str, Sequence[Counts]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    try:
        find_venv()
    except EmulationError as error:
        pytest.skip(str(error))
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def measured(folder) -> Measured:
    return {name: trace(WAYS[name], folder, batches=BATCHES, steps=4) for name in ("article", "ours")}


def values(measured: Measured, way: str, region: str, name: str) -> dict[int, list[int]]:
    found = {batch: [getattr(counts, name) for counts in measured[way][batch][region]] for batch in BATCHES}
    assert all(len(entries) >= 4 for entries in found.values()), f"too few decode steps were traced: {found}"
    return found


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("what", ["to_device", "to_host", "syncs"])
def test_ours_neither_waits_nor_copies_inside_a_layer(measured, what):
    for region in REGIONS:
        for counts in values(measured, "ours", region, what).values():
            assert set(counts) == {0}


@pytest.mark.emulated
@pytest.mark.slow
def test_ours_launches_fewest(measured):
    for region in REGIONS:
        launches = {way: values(measured, way, region, "launches") for way in measured}
        for batch in BATCHES:
            assert max(launches["ours"][batch]) < min(launches["article"][batch]), (region, batch)


@pytest.mark.emulated
@pytest.mark.slow
def test_ours_moves_what_the_roofline_counts(measured):
    for region in REGIONS:
        for batch in BATCHES:
            assert 1 < over_roofline(measured["ours"][batch][region]) < TOLERATED, (region, batch)


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.long
def test_the_counts_see_waits_casts_and_copies_of_the_other_paths(measured, folder):
    small_ops = trace(WAYS["small_ops"], folder, batches=(8,), steps=4)[8]
    assert mean(small_ops["layer"], "syncs") > 1
    assert mean(small_ops["layer"], "to_device") > 0
    assert mean(small_ops["experts"], "to_host") == 2  # the rows of each expert, twice
    for batch in BATCHES:
        # a copy of the output; two casts and seven small operators for three, but the router's cast
        assert mean(measured["article"][batch]["attention"], "launches") == 3
        assert mean(measured["article"][batch]["experts"], "launches") == 17
        ours, article = (over_roofline(measured[way][batch]["experts"]) for way in ("ours", "article"))
        assert article > ours + 0.01


@pytest.mark.emulated
@pytest.mark.slow
def test_ours_neither_waits_nor_copies_between_captured_graphs(folder):
    """Three requests in a bucket of four: the padded row costs one launch, the zeroed tail."""
    found = trace(WAYS["ours"], folder, PIECEWISE, batches=(3,), steps=4)[3]
    assert [(c.to_device, c.to_host, c.syncs) for c in found["attention"]] == [(0, 0, 0)] * len(found["attention"])
    assert {c.launches for c in found["attention"]} == {3}
    layers = trace_table.SHAPE["layers"]
    assert {c.replays for c in found["step"]} == {layers + 1}


def documented(columns: Iterable[str]) -> dict[tuple[str, ...], dict[str, float]]:
    """Of the page's table that has these columns: the words before the first number of each row -> column -> number."""
    found, names = {}, []
    for line in trace_table.PAGE.read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells or cells[0] == "batch":
            names = cells if set(columns) <= set(cells) else []
        elif names and not line.startswith("|---"):
            first = names.index("device ops")
            found[tuple(cells[:first])] = {
                name: float(cell) for name, cell in list(zip(names, cells, strict=True))[first:] if cell != "–"
            }
    return found


@pytest.mark.emulated
@pytest.mark.slow
def test_the_documented_table_is_what_is_counted(measured):
    rows = documented(["host time"])
    exact = {"device ops": "launches", "host→device": "to_device", "device→host": "to_host", "syncs": "syncs"}
    for way in ("article", "ours"):
        for batch in BATCHES:
            for region in REGIONS:
                counts, row = measured[way][batch][region], rows[str(batch), region, WAYS[way].title]
                assert {column: row[column] for column in exact} == {
                    column: float(number(mean(counts, name))) for column, name in exact.items()
                }
                assert row["bytes / roofline"] == pytest.approx(over_roofline(counts), abs=0.01)


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.long
def test_the_documented_steps_of_9_1_are_what_is_counted(folder):
    try:
        find_venv(stack=stacks.named("9.1"))
    except EmulationError as error:
        pytest.skip(str(error))
    (counts, *_) = trace(WAYS["ours"], folder, trace_table.FULL_9_1, batches=(8,), steps=4)[8]["step"]
    row = documented(["graph replays", "MB moved"])["8", "ours, full decode graphs, 9.1"]
    exact = {column: what for column, what in trace_table.STACK_COLUMNS.items() if what != "bytes"}
    assert {column: row[column] for column in exact} == {
        column: getattr(counts, what) for column, what in exact.items()
    }
    assert row["MB moved"] == pytest.approx(counts.bytes / 1e6, rel=0.1)


@pytest.mark.emulated
@pytest.mark.ascend_compiler
@pytest.mark.slow
@pytest.mark.long
def test_the_documented_bytes_of_packed_experts_are_what_is_counted(folder):
    """One request always touches four experts."""
    if not trace_table.COMPILER.is_dir():
        pytest.skip("the compiler is not set up: make setup-ascend-compiler")
    rows = documented(["bytes a weight touched"])
    for way in trace_table.FROM_MXFP4.values():
        counts, *others = trace(way, folder, batches=(1,), steps=4)[1]["experts"]
        assert all((c.launches, c.bytes) == (counts.launches, counts.bytes) for c in others)
        row = rows["1", "experts", way.title]
        assert row["device ops"] == counts.launches
        assert row["MB read"] == pytest.approx(counts.read / 1e6, abs=0.01)
        assert row["MB written"] == pytest.approx(counts.written / 1e6, abs=0.01)
        assert row["bytes a weight touched"] == pytest.approx(trace_table.bytes_a_weight([counts]), abs=0.01)
    weights = trace_table.TOP_K * 3 * trace_table.SHAPE["hidden"] * trace_table.SHAPE["intermediate"]
    expanded, packed = (rows["1", "experts", way.title] for way in trace_table.FROM_MXFP4.values())
    assert packed["MB written"] - expanded["MB written"] == pytest.approx(weights * 2 / 1e6, abs=0.02)
    assert packed["MB read"] - expanded["MB read"] == pytest.approx(weights * mxfp4.BITS / 8 / 1e6, abs=0.02)


def lines(*events: dict[str, Any]) -> list[str]:
    return [json.dumps(event) for event in events]


def begin(region: str, **fields: Any) -> dict[str, Any]:
    return {"event": "mark", "name": "begin", "region": region, **fields}


def end(region: str, **fields: Any) -> dict[str, Any]:
    return {"event": "mark", "name": "end", "region": region, "host_ns": 5, **fields}


ATTENTION = begin("attention", seq_lens=[200, 100], window=128)
SYNC = {"event": "sync", "what": "stream"}


def test_a_blocking_copy_is_one_wait_with_or_without_its_synchronisation():
    blocking = {"event": "copy", "kind": "h2d", "bytes": 8, "sync": True}
    steps = begin("step", requests=2, tokens=2), ATTENTION, SYNC, blocking, blocking, end("attention"), end("step")
    found = read_trace(lines(*steps), 2)
    assert [(c.syncs, c.to_device) for c in found["attention"] + found["step"]] == [(2, 2), (2, 2)]


def test_processes_are_counted_apart():
    """Two ranks write into one file, line by line as they come."""
    events = begin("step", requests=2, tokens=2), ATTENTION, SYNC, end("attention"), end("step")
    mixed = [{**event, "pid": pid} for event in events for pid in (1, 2)]
    found = read_trace(lines(*mixed), 2, ranks=2)
    assert [c.syncs for c in found["attention"] + found["step"]] == [1] * 4
    assert {c.needed for c in found["attention"]} == {(128 + 100) * 2 * 1 * 64 * 2}


def test_collectives_count_where_they_run_and_updates_are_no_launches():
    ran, captured = ({"event": "collective", "name": "all_reduce", "phase": phase} for phase in ("replay", "capture"))
    update = {"event": "op", "name": "aten::abs", "phase": "update", "read": 0, "written": 0}
    steps = begin("step", requests=2, tokens=2), ran, captured, update, end("step")
    (counts,) = read_trace(lines(*steps), 2)["step"]
    assert (counts.collectives, counts.updates, counts.launches) == (1, 1, 0)


def test_only_decode_steps_of_the_batch_are_counted_and_what_is_captured_is_not():
    captured = {"event": "op", "name": "aten::abs", "phase": "capture", "read": 8, "written": 8}
    prefill = begin("step", requests=2, tokens=9), ATTENTION, end("attention"), end("step")
    decode = begin("step", requests=2, tokens=2), ATTENTION, captured, end("attention"), end("step")
    found = read_trace(lines(*prefill, *decode), 2)
    assert [(c.launches, c.bytes) for c in found["attention"]] == [(0, 0)]
    assert found["attention"][0].needed == found["step"][0].needed == (128 + 100) * 2 * 2 * 64 * 2


def test_a_page_without_a_place_for_the_table_is_told_before_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Counting takes half an hour."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(trace_table, "PAGE", page)
    monkeypatch.setattr(trace_table, "measure", lambda *given: pytest.fail("it counted"))
    for text in ("no marks", trace_table.END + trace_table.BEGIN, trace_table.BEGIN * 2 + trace_table.END):
        page.write_text(text)
        assert trace_table.main(["--write"]) == 2
        assert f"{page} needs one place for the table" in capsys.readouterr().err
        assert page.read_text() == text


def test_the_table_takes_its_place_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before {trace_table.BEGIN} old {trace_table.END} after {trace_table.END}")
    monkeypatch.setattr(trace_table, "PAGE", page)
    monkeypatch.setattr(trace_table, "measure", lambda directory, plan: {})
    monkeypatch.setitem(trace_table.PARTS, "", (trace_table.BEGIN, trace_table.PLAN, lambda found: "new"))
    assert trace_table.main([]) == 0
    assert " old " in page.read_text()
    assert trace_table.main(["--write"]) == 0
    assert page.read_text() == f"before {trace_table.BEGIN}\n\nnew\n\n{trace_table.END} after {trace_table.END}"
    assert list(tmp_path.iterdir()) == [page]
