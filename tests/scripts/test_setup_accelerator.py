"""Where `make serve` serves: machines that are not here, as fake drivers, and the recipe that follows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.setup import accelerator
from scripts.setup.accelerator import choose, gpu
from tests.scripts.shell import ROOT, make, write_program


class Driver:
    """libcuda.so.1 of a machine."""

    def __init__(self, status: int = 0, count: int = 1, driver: int = 13000, capability: tuple[int, int] = (9, 0)):
        self.status, self.count, self.driver, self.capability = status, count, driver, capability

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.count

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = self.driver

    def cuDeviceGet(self, device: Any, index: int) -> None:
        device._obj.value = index

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        value._obj.value = self.capability[(75, 76).index(attribute)]


def absent(name: str) -> None:
    raise OSError(name)


def on(wanted: str, load: Any, machine: str = "x86_64") -> tuple[str, str]:
    return choose(wanted, lambda: gpu(load, machine))


def test_a_gpu_is_used_unless_the_user_names_the_cpu() -> None:
    for driver in (Driver(), Driver(driver=13020, capability=(10, 3)), Driver(capability=(8, 0))):
        assert on("", lambda name, driver=driver: driver) == ("cuda", "")
    assert on("cuda", lambda name: Driver()) == ("cuda", "")
    assert on("cpu", lambda name: Driver()) == ("cpu", "")


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (absent, "libcuda.so.1 is not there"),
        (lambda name: Driver(status=100), "no device"),
        (lambda name: Driver(status=34), "stub"),
        (lambda name: Driver(count=0), "CUDA_VISIBLE_DEVICES"),
    ],
    ids=["no driver", "no device", "stub", "hidden"],
)
def test_without_a_gpu_it_is_the_cpu_without_a_word_and_on_cuda_is_refused(load: Any, words: str) -> None:
    assert on("", load) == ("cpu", "")
    place, told = on("cuda", load)
    assert place == ""
    assert words in told
    assert "ON=cpu" in told


@pytest.mark.parametrize(
    ("driver", "machine", "words"),
    [
        (Driver(driver=12080), "x86_64", "CUDA 12.8, expected 13.0: install driver 580"),
        (Driver(capability=(7, 5)), "x86_64", "compute capability 7.5"),
        (Driver(), "aarch64", "aarch64"),
        (Driver(status=803), "x86_64", "cuInit returns 803"),
    ],
    ids=["old driver", "old GPU", "Arm", "broken driver"],
)
def test_a_gpu_that_cannot_serve_is_named_with_the_reason(driver: Driver, machine: str, words: str) -> None:
    place, told = on("", lambda name: driver, machine)
    assert place == "cpu"
    assert words in told
    place, told = on("cuda", lambda name: driver, machine)
    assert place == ""
    assert words in told


def test_a_place_that_is_not_known_is_refused_before_anything_is_set_up(capsys: pytest.CaptureFixture) -> None:
    assert accelerator.main("gpu") == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "ON=gpu" in told.err
    assert "cpu or cuda" in told.err


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose set-up, and whose environments' Pythons, print what they were asked for."""
    for name in ("Makefile", "scripts/setup/accelerator.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts/setup/environments.py").write_text("import sys; print('set-up', sys.argv[-1])")
    for venv in (".venv", ".venv-cuda"):
        write_program(tmp_path / venv / "bin/python", f'echo {venv} "$@"')
    return tmp_path


def serve(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return make("serve", f"PYTHON={sys.executable}", *words, cwd=checkout)


def test_make_serve_with_a_gpu_sets_up_and_runs_its_environment(checkout: Path) -> None:
    (checkout / "scripts/setup/accelerator.py").write_text("print('cuda')")
    asked = serve(checkout, "MODEL=/my models/20b", "PORT=8001")
    assert asked.stdout.splitlines() == [
        "set-up cuda",
        ".venv-cuda scripts/serve_here.py --on=cuda --model=/my models/20b --host=127.0.0.1 --port=8001 --flags=",
    ], asked.stderr


def test_make_serve_on_the_cpu_is_what_it_was(checkout: Path) -> None:
    assert serve(checkout, "ON=cpu").stdout.splitlines() == [
        "set-up cpu",
        ".venv scripts/serve_here.py --on=cpu --model= --host=127.0.0.1 --port=8000 --flags=",
    ]


@pytest.mark.parametrize("wanted", ["gpu", "$(touch ran)", "'; touch ran; '"])
def test_make_serve_with_an_unknown_place_ends_before_the_set_up(checkout: Path, wanted: str) -> None:
    asked = serve(checkout, f"ON={wanted}")
    assert asked.returncode
    assert asked.stdout == ""
    assert asked.stderr.count("expected cpu or cuda") == 1
    assert not (checkout / "ran").exists()
