"""`npu-gptoss tune`: its choice with a fake clock, and each tile measured where it counts."""

from __future__ import annotations

import math

import pytest
import torch

from npu_gptoss.bench import tune
from npu_gptoss.bench.tune import SITES, best, cases_of, timer
from npu_gptoss.cli import main
from npu_gptoss.kernels import load_kernels, platform_override
from npu_gptoss.kernels.platform import SUPPORTED
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.kernels.tiles import shipped, tile
from tests.moe.cases import tiles_of

CPU = torch.device("cpu")
START = {"rows": 64, "stages": 4}
CHOICES = {"rows": (32, 64, 128), "stages": (2, 4, 6)}


def test_the_fastest_is_found_one_number_after_the_other() -> None:
    asked = []

    def time(row: dict[str, int]) -> float:
        asked.append(tuple(row.values()))
        return {128: 0.5, 64: 1.0, 32: 0.9}[row["rows"]] * (0.8 if row["stages"] == 6 else 1.0)

    found, share = best(START, CHOICES, time)
    assert found == {"rows": 128, "stages": 6}
    assert share == pytest.approx(0.4)
    assert len(asked) == len(set(asked)), "nothing is measured twice"


def test_noise_and_impossible_tiles_change_nothing() -> None:
    def time(row: dict[str, int]) -> float:
        return 1.0 if row == START else 0.995 if row["rows"] == 64 else math.inf

    assert best(START, CHOICES, time) == (START, 1.0)


class Refused(Exception):
    pass


@pytest.mark.parametrize(
    ("stages", "kept"), [(2, True), (3, False), (5, False)], ids=["rounding", "other numbers", "does not compile"]
)
def test_tile_with_other_results_or_none_is_never_the_best(stages: int, kept: bool) -> None:
    name = "dense.output.16"

    def call() -> torch.Tensor:
        here = tile(name, dict)["stages"]
        if here == 5:
            raise Refused
        return torch.full((4,), {2: 1.001, 3: 1.2, 4: 1.0}[here])

    time = timer(name, [[call]], CPU, (Refused,))
    row = shipped()[0].rows[name]
    assert math.isfinite(time({**row, "stages": 4}))
    assert math.isfinite(time({**row, "stages": stages})) == kept


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_a_tile_is_measured_with_a_kernel_and_sizes_that_read_it(site: tune.Site) -> None:
    """On an H200; the sizes at which a tile counts are in its name or are the kernel's."""
    load_kernels()
    row, cases = shipped()[0].rows[site.name], list(cases_of(site, CPU))
    assert site.choices.keys() <= row.keys()
    assert cases
    with platform_override(SUPPORTED["cuda"]):
        for case in cases:
            kernel = registry.kernels[site.kernel]
            assert reasons_against(kernel, *case.described, SUPPORTED["cuda"]) == ()


def test_the_sizes_that_are_measured_read_the_tile_of_the_name() -> None:
    pytest.importorskip("triton")
    from npu_gptoss.attention.triton.launch_decode import decode_config
    from npu_gptoss.dense.triton import launch_hopper
    from npu_gptoss.kernels.tiles import trial

    def reads(site: tune.Site, batch: int) -> list[object]:
        if site.name.startswith("dense."):
            return [launch_hopper._ring(site.name.split(".")[1], batch)]
        if site.name.startswith("attention.decode."):
            return [decode_config(torch.bfloat16, "window" in site.name, batch)]
        return list(tiles_of(site.kernel, "mxfp4", batch, batch * 4, 32))

    for site in (site for site in SITES if not site.name.startswith("attention.prefill")):
        field = next(iter(site.choices))
        for batch in site.points.batches:
            with trial(site.name, {**shipped()[0].rows[site.name], field: 7}):
                assert 7 in [getattr(found, field) for found in reads(site, batch)], (site.name, batch)


def test_without_a_gpu_it_ends_with_a_sentence_and_writes_nothing(tmp_path, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = tmp_path / "tiles.json"
    assert main(["tune", "--out", str(out)]) == 2
    assert "on an NVIDIA GPU" in capsys.readouterr().err
    assert main(["tune", "--out", str(out), "--only", "dense", "no.such"]) == 2
    assert "--only no.such" in capsys.readouterr().err
    assert not out.exists()
    assert main(["tune", "--out", str(tmp_path)]) == 2, "before a tile is measured"
    assert "cannot be written" in capsys.readouterr().err
