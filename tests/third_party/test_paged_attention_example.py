"""A kernel of another package, from its entry point to its switch: the steps of docs/add-a-kernel.md.

The package is not installed: a folder with its module and the metadata that pip would write is put on PYTHONPATH, so
that new processes find it as an installed one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.markdown import ROOT, code_blocks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

PACKAGE = Path(__file__).with_name("paged_attention_example")
MODULE, PROJECT = PACKAGE / "paged_attention_example.py", PACKAGE / "pyproject.toml"
PAGE = ROOT / "docs" / "add-a-kernel.md"
KERNEL, ORIGIN = "attention.paged.sdpa_example", "paged-attention-example:attention"
LINES = [line for block in code_blocks(PAGE, "sh") for line in block.splitlines()]
COMMANDS = [line for line in LINES if "npu-gptoss " in line]

# a call of the public operation, as the engine and vLLM make it
CALL = """
import json, torch
import paged_attention_example
from npu_gptoss.attention import AttentionMetadata, paged_attention
from npu_gptoss.kernels import selected_kernels
from npu_gptoss.kernels.registry import registry

theirs = paged_attention_example.paged_attention
early = [name for name, kernel in registry.kernels.items() if kernel.function is theirs]
torch.manual_seed(0)
cache = torch.randn(2, 12, 16, 2, 64).bfloat16()
tables = torch.arange(20, dtype=torch.int32).view(2, 10) % 12
step = AttentionMetadata((0, 40, 41), (40, 150), tables, torch.zeros(41, dtype=torch.int32))
arguments = (torch.randn(41, 8, 64).bfloat16(), *cache, step, torch.randn(8).bfloat16())
got = paged_attention(*arguments, scale=0.125, sliding_window=128)
chosen = selected_kernels()
want = paged_attention(*arguments, scale=0.125, sliding_window=128, kernel="reference")
print(json.dumps({"early": early, "chosen": chosen, "error": (got - want).abs().max().item()}))
"""


def install(folder: Path, module: str) -> Path:
    """Writes the files of `pip install`: the module, and the metadata that its pyproject.toml asks for."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (folder / MODULE.name).write_text(module)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    return folder


def python(*arguments: str, site: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(site), str(ROOT)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NPU_GPTOSS_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=site,
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def npu_gptoss(line: str, site: Path) -> subprocess.CompletedProcess[str]:
    """A line of the page: variables, then the command."""
    words = shlex.split(line)
    command = words.index("npu-gptoss")
    variables = dict(word.split("=", 1) for word in words[:command])
    return python("-m", "npu_gptoss.cli", *words[command + 1 :], site=site, **variables)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"), MODULE.read_text())


@pytest.fixture(scope="module")
def said(site: Path) -> Callable[[str], str]:
    """The output of a command of the page, named by a part of it; each runs once, and succeeds."""
    done: dict[str, str] = {}

    def of(part: str) -> str:
        (line,) = [part] if part in COMMANDS else [line for line in COMMANDS if part in line]
        if line not in done:
            run = npu_gptoss(line, site)
            assert run.returncode == 0, f"{line}: {run.stdout[-2000:]}{run.stderr[-2000:]}"
            done[line] = run.stdout
        return done[line]

    return of


def test_the_page_shows_parts_of_the_package_and_no_other_code() -> None:
    (python,), (toml,) = code_blocks(PAGE, "python"), code_blocks(PAGE, "toml")
    assert python in MODULE.read_text()
    assert toml in PROJECT.read_text()
    (install,) = [line for line in LINES if line.startswith("pip install ")]
    assert ROOT / install.split()[-1] == PACKAGE
    assert len(COMMANDS) + 1 == len(LINES), "a line of the page that no test runs"
    assert re.findall(r"^## (\d)\. ", PAGE.read_text(), re.M) == ["1", "2", "3", "4", "5"]


def test_every_command_of_the_page_prints_the_shown_lines(said: Callable[[str], str]) -> None:
    printed = "\n".join(said(line) for line in COMMANDS)
    shown = [line for block in code_blocks(PAGE, "") for line in block.splitlines()]
    assert len(shown) >= 6
    for line in shown:
        pattern = ".*".join(map(re.escape, line.split("…")))
        assert re.search(rf"^\s*{pattern}$", printed, re.M), f"no command of the page prints {line!r}"


def test_the_kernel_wins_by_its_band_and_falls_out_where_it_states_nothing(said: Callable[[str], str]) -> None:
    (line,) = [line for line in said("kernels list").splitlines() if KERNEL in line]
    assert line.split()[0] == "16"
    assert f"[{ORIGIN}]" in line
    stated = said("npu-gptoss kernels explain attention.paged --platform cpu")
    assert f"  {KERNEL} (priority 16): selected" in stated
    assert "  attention.paged.small_ops (priority 4): could run" in stated
    other = said("--set head_dim=128")
    assert f"  {KERNEL} (priority 16): no: handles head_dim 64, got 128" in other
    assert "  attention.paged.small_ops (priority 4): selected" in other


def test_a_call_runs_the_kernel_which_its_import_does_not_register(site: Path) -> None:
    run = python("-c", CALL, site=site, NPU_GPTOSS_PLATFORM="cpu")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["early"] == []
    assert found["chosen"] == [["attention.paged", KERNEL, "sdpa_example"]]
    assert found["error"] < 0.02


def test_the_kernel_is_verified_with_every_known_mistake(said: Callable[[str], str]) -> None:
    text = said("npu-gptoss verify")
    assert f"ok   {KERNEL} [{ORIGIN}]" in text
    caught, of = re.search(r"(\d+) of (\d+) mistakes caught", text).groups()
    assert caught == of
    assert int(caught) >= 15
    assert "not for this kernel" not in text


@pytest.mark.parametrize(
    ("right", "wrong", "only"),
    [
        pytest.param("mask = sinks.float()[", "mask = (sinks.float() - 1e4)[", "", id="sink lost"),
        pytest.param("keys_before(sliding_window)", "sliding_window", "window", id="a key too many"),
    ],
)
def test_a_mistake_in_the_package_fails_verify(tmp_path: Path, right: str, wrong: str, only: str) -> None:
    source = MODULE.read_text()
    assert source.count(right) == 1
    site = install(tmp_path / "site", source.replace(right, wrong))
    run = npu_gptoss("npu-gptoss verify paged-attention-example --device cpu --cases 1 --json results.json", site)
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"FAIL {KERNEL} [{ORIGIN}]" in run.stdout
    assert "times the tolerance" in run.stdout
    assert f"again: npu-gptoss verify {KERNEL} --seed 0 --cases 1" in run.stdout
    (kernel,) = json.loads((site / "results.json").read_text())["kernels"]
    failed = [call["call"] for call in kernel["calls"] if call["state"] == "failed"]
    assert failed
    assert all(only in name for name in failed), "a layer that sees all keys is right"


def test_the_kernel_is_measured_and_marked_as_selected(said: Callable[[str], str], site: Path) -> None:
    assert f"*{KERNEL}" in said("npu-gptoss bench")
    records = json.loads((site / "attention.json").read_text())["records"]
    selected = {str(record["kernel"]): record["selected"] for record in records}
    assert (selected[KERNEL], selected["attention.paged.small_ops"]) == (True, False)
    assert all(record["us"] > 0 for record in records if record["kernel"] == KERNEL)


def test_the_switch_leaves_the_package_out(said: Callable[[str], str]) -> None:
    assert f"  {KERNEL} (priority 16): could run" in said("NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops")
    text = said("NPU_GPTOSS_DISABLE_PLUGINS=1")
    assert KERNEL not in text
    assert "  attention.paged.small_ops (priority 4): selected" in text
