"""The choice of a table of tiles: the GPU's own, the nearest, or a user's, and its message."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import tiles
from npu_gptoss.kernels.tiles import Gpu, Table, as_text, nearest, read, shipped, table, tile
from tests.refused import refused

H200 = Gpu("NVIDIA H200", (9, 0), 132, 4800)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 3350)
NAME = "dense.output.16"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test starts like a new process."""

    def forget() -> None:
        tiles.table.cache_clear()
        tiles._of_table.cache_clear()

    forget()
    yield
    forget()


def on(monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None) -> None:
    monkeypatch.setattr(tiles, "this_gpu", lambda: gpu)


def written(path: Path, gpu: Gpu = H100, **changed: Any) -> Path:
    """A table as `tune` writes it, with other numbers of one tile."""
    rows = {**shipped()[0].rows, NAME: {**shipped()[0].rows[NAME], **changed}}
    path.write_text(as_text(Table(gpu, rows)))
    return path


def test_a_gpu_with_a_table_of_its_own_gets_it_without_a_word(monkeypatch, caplog) -> None:
    on(monkeypatch, H200)
    assert table().gpu == H200
    on(monkeypatch, None)
    table.cache_clear()
    assert table().gpu == H200, "the interpreter computes with the tiles that were measured"
    assert caplog.records == []


def test_another_gpu_gets_the_nearest_and_one_line(monkeypatch, caplog) -> None:
    on(monkeypatch, H100)
    with caplog.at_level(logging.INFO, "vllm.npu_gptoss"):
        for name in (NAME, "dense.output.32"):
            assert tile(name, dict) == shipped()[0].rows[name]
    (said,) = caplog.messages
    assert "no tiles measured on NVIDIA H100 80GB HBM3 and takes those of NVIDIA H200" in said
    assert "npu-gptoss tune" in said


def test_nearest_gpu_by_capability_then_processors_then_memory() -> None:
    gpus = (
        Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2039),
        Gpu("NVIDIA H100 PCIe", (9, 0), 114, 2000),
        H200,
        Gpu("NVIDIA B200", (10, 0), 148, 8000),
    )
    tables = [Table(gpu, {}) for gpu in gpus]

    def of(*described: Any) -> str:
        return nearest(Gpu(*described), tables).gpu.name

    assert of("NVIDIA H100 PCIe", (9, 0), 132, 4800) == "NVIDIA H100 PCIe", "its own, whatever else"
    assert of("NVIDIA H100 80GB HBM3", (9, 0), 132, 3350) == "NVIDIA H200"
    assert of("NVIDIA GH200", (9, 0), 116, 4000) == "NVIDIA H100 PCIe"
    assert of("NVIDIA A10", (8, 6), 72, 600) == "NVIDIA H100 PCIe", "8.6 is nearer to 9.0 than to 8.0"
    assert of("NVIDIA B300", (10, 3), 148, 8000) == "NVIDIA B200"
    slower = [Table(Gpu("a", (9, 0), 132, 4800), {}), Table(Gpu("b", (9, 0), 132, 3000), {})]
    assert nearest(H100, slower).gpu.name == "b"


def test_a_users_table_counts_on_the_gpu_that_it_was_measured_on(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("NPU_GPTOSS_TILES", str(written(tmp_path / "h100.json", stages=3)))
    on(monkeypatch, H100)
    assert tile(NAME, dict)["stages"] == 3
    assert caplog.records == []
    table.cache_clear()
    on(monkeypatch, H200)
    with refused("NPU_GPTOSS_TILES"):
        table()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no table of tiles.*FileNotFoundError"),
        ("{", "no table of tiles"),
        ("[]", "no table of tiles"),
        ('{"gpu": {"name": "x"}, "tiles": {}}', "no table of tiles.*capability"),
        ({"tiles": {}}, "lacks attention.decode.full"),
        ({"tiles": {**shipped()[0].rows, "dense.new": {}}}, "unknown tile, dense.new"),
        ({"tiles": {**shipped()[0].rows, NAME: {"inputs": 256}}}, f"{NAME} needs .* inputs, stages, splits"),
        ({"tiles": {**shipped()[0].rows, NAME: {"inputs": 256, "stages": 0, "splits": 1}}}, "positive whole number"),
        ({"tiles": {**shipped()[0].rows, NAME: {"inputs": 256, "stages": "5", "splits": 1}}}, "positive whole number"),
    ],
    ids=["absent", "cut off", "a list", "half a GPU", "empty", "unknown", "too few", "zero", "text"],
)
def test_a_spoiled_table_is_refused_with_the_command_that_writes_it_anew(tmp_path, content, words) -> None:
    path = tmp_path / "tiles.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(as_text(shipped()[0])), **content})
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"(?s){words}.*npu-gptoss tune --out {path}"):
        read(path, shipped()[0])


def test_table_written_by_tune_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path / "h100.json", splits=4)
    found = read(path, shipped()[0])
    assert found.gpu == H100
    assert found.rows[NAME]["splits"] == 4
    assert path.read_text() == as_text(found)


def test_every_shipped_table_has_the_format_of_tune() -> None:
    paths = sorted(tiles.FOLDER.glob("tiles-*.json"))
    assert [path.read_text() for path in paths] == [as_text(read(path, shipped()[0])) for path in paths]
    assert len({found.gpu.name for found in shipped()}) == len(paths)


def test_the_gpu_is_described_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert tiles.this_gpu() == H200
