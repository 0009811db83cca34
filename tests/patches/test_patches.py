"""Each diff of `patches/` applies to its release and repairs its defect, without our plugin, on the emulated 910B."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.launch import Machine, environment

from emulator.tests.machine import venv
from tests.checkpoints import write_random_checkpoint
from tests.oracle import load_oracle
from tests.serving.emulated.conftest import asking, importing, of_oracle
from tests.serving.emulated.rounds import EAGER, VOCABULARY, errors, prompts, turn

ROOT = Path(__file__).resolve().parents[2]
OF_0_11, OF_0_23 = (
    sorted((ROOT / f"patches/vllm-ascend-{release}").glob("*.diff")) for release in ("0.11.0", "0.23.0")
)
# vllm-ascend 0.23 would capture 83 sizes
SIZES = [8, 4, 2, 1]
FULL = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}}
MACHINES = {"vllm-ascend-0.11.0": Machine(), "vllm-ascend-0.23.0": Machine("9.1")}

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed, which applies the diffs"),
]


def site(release: str) -> Path:
    """The folder in which the released vllm-ascend is installed."""
    machine = MACHINES[release]
    (folder,) = venv(machine).glob("lib/python3*/site-packages")
    if not any(folder.glob(f"{release.replace('vllm-ascend', 'vllm_ascend')}*.dist-info")):
        pytest.skip(f"the emulated environment has no {release}")
    return folder


def apply(diff: Path, folder: Path, *options: str) -> None:
    command = ["git", "apply", "--whitespace=nowarn", *options, str(diff)]  # two files have lines that end in CR LF
    variables = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def repaired(folder: Path, *diffs: Path) -> str:
    """A copy of a release with diffs; several share their context."""
    origin = site(diffs[0].parent.name)
    shutil.copytree(origin / "vllm_ascend", folder / "vllm_ascend", ignore=shutil.ignore_patterns("*.so"))
    for library in (origin / "vllm_ascend").rglob("*.so"):
        (folder / library.relative_to(origin)).symlink_to(library)
    for diff in diffs:
        apply(diff, folder, "-C1")
    return str(folder)


@pytest.mark.parametrize("diff", [*OF_0_11, *OF_0_23], ids=lambda diff: diff.stem)
def test_a_diff_applies_alone(diff: Path) -> None:
    apply(diff, site(diff.parent.name), "--check")


SEEN = {
    "decode_query_list": {"query ends": [1, 2, 3, 4, 5], "key lengths": [5, 6, 7, 1, 1]},
    "rope_buffer": {"right": True, "buffer replaced in forward": False},
    "yarn_truncate": [False, True],
    "quantization_claim": {
        "mxfp4": None,
        **dict.fromkeys(("mxfp4, with --quantization ascend", "ascend", "no method named"), "ascend"),
    },
}


def test_the_diffs_change_what_they_promise(tmp_path: Path) -> None:
    place = venv(Machine())
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "ascend"}
    run = subprocess.run(
        [str(place / "bin/python"), "-m", "tests.patches.observations"],
        cwd=ROOT,
        env=environment(Machine(), place) | quiet | {"PYTHONPATH": repaired(tmp_path, *OF_0_11)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads(run.stdout.splitlines()[-1]) == SEEN


LEFT_OUT = ("02-attention-sinks", "03-moe-bias-activation")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("without", ["", *LEFT_OUT])
def test_stock_vllm_serves_gpt_oss_only_with_the_diffs(without: str, tmp_path: Path) -> None:
    """`truncate`: vLLM 0.11.0 reads only true rightly."""
    tree = repaired(tmp_path / "tree", *(diff for diff in OF_0_11 if diff.stem != without))
    write_random_checkpoint(tmp_path / "checkpoint", vocab_size=VOCABULARY, truncate=True)
    rounds = [turn((5, 40, 200), tokens=2)]
    with importing(Machine(), NPU_GPTOSS="0", PYTHONPATH=tree) as process:
        serve = asking(process, tmp_path / "checkpoint", tmp_path)
        results, _ = serve(rounds, options={"dtype": "bfloat16", **EAGER})
    found = torch.cat(errors(rounds, results, of_oracle(load_oracle(tmp_path / "checkpoint")))[0])
    assert (float(found.median()) < 0.05 and float(found.max()) < 0.5) == (not without)  # bfloat16's rounding


def test_the_diff_of_0_23_changes_every_window() -> None:
    (diff,) = OF_0_23
    name = re.search(r"^\+\+\+ b/(.+)$", diff.read_text(), re.M)[1]
    released = (site("vllm-ascend-0.23.0") / name).read_text()
    asked = re.findall(r"pre_tokens ?= ?((?:self\.)?sliding_window.*)", released)
    written = re.findall(r"^\+.*pre_tokens ?= ?((?:self\.)?sliding_window - 1.*)", diff.read_text(), re.M)
    assert [text.replace(" - 1", "") for text in written] == [
        text.replace("sliding_window or SWA_INT_MAX", "sliding_window if self.sliding_window else SWA_INT_MAX")
        for text in asked
    ]


LENGTH, DISTANCES, STEPS = 300, range(125, 131), 2


def keys_seen(answers: list[dict[str, Any]]) -> list[int]:
    """The number of keys in a window: of the prompt's last row, and of the decode step after it.

    The model has one layer, so that its logits change with a token if and only if the layer sees it. The first answer
    is of a prompt, the others of the same with one other token, one of DISTANCES before its last.
    """
    plain, *others = answers
    assert [other["tokens"] for other in others] == [plain["tokens"]] * len(others), "their answers differ"

    def changed(other: dict[str, Any], step: int) -> bool:
        pairs = zip(plain["logprobs"][step], other["logprobs"][step], strict=True)
        return max(abs(a - b) for a, b in pairs) > 1e-5  # rounding of float32 is a hundredth of it

    seen = list(zip(DISTANCES, others, strict=True))
    return [1 + max(distance + step for distance, other in seen if changed(other, step)) for step in range(STEPS)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("with_diff", "seen"), [(False, 129), (True, 128)], ids=["released", "with the diff"])
def test_on_the_emulated_9_1_the_diff_makes_128_keys_of_129(tmp_path: Path, with_diff: bool, seen: int) -> None:
    """Eager, and with decode steps as one graph, which other lines capture and update."""
    write_random_checkpoint(tmp_path / "one-layer", vocab_size=VOCABULARY, layers=1)
    (plain,) = prompts((LENGTH,))
    asked = [plain, *([*plain[: -1 - d], (plain[-1 - d] + 1) % VOCABULARY, *plain[LENGTH - d :]] for d in DISTANCES)]
    paths = {"PYTHONPATH": repaired(tmp_path / "tree", *OF_0_23)} if with_diff else {}
    with importing(Machine("9.1"), NPU_GPTOSS="0", **paths) as process:
        serve = asking(process, tmp_path / "one-layer", tmp_path)
        for options, strict in ((EAGER, True), (FULL, False)):
            turn = {"prompts": asked, "tokens": STEPS, "spoil": None}
            (answers,), _ = serve([turn], options=options, machine={"strict": strict})
            assert keys_seen(answers) == [seen] * STEPS
