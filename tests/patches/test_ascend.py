"""`patches/vllm-ascend-0.11.0`: each diff applies to the release and repairs its defect, without our plugin.

The released package is copied into a temporary folder, and a fork imports it from there, on the emulated 910B.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.launch import Machine, environment

from tests.checkpoints import write_random_checkpoint
from tests.oracle import load_oracle
from tests.patches import trees
from tests.serving.emulated.conftest import asking, importing, of_oracle
from tests.serving.emulated.rounds import EAGER, VOCABULARY, errors, turn

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Change:
    """What is seen in the release, and with the diff."""

    before: Any
    after: Any


WRONG = Change(False, True)
EXPECTED: dict[str, dict[str, Any]] = {  # a plain value: the diff must leave it as it is
    "decode_query_list": {
        "query ends": Change([1, 2, 3, 4], [1, 2, 3, 4, 5]),
        "key lengths": [5, 6, 7, 1, 1],
        "on the device": Change([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]),
        "without padding": [1, 2, 3],
    },
    "attention_sinks": {
        f"{state}, {case}": right
        for state in ("PrefillNoCache", "ChunkedPrefill", "DecodeOnly")
        for case, right in (("no sinks", True), ("sinks", WRONG), ("and window", WRONG))
    },
    "moe_bias_activation": {
        "silu without biases": True,
        "silu with biases": WRONG,
        "swigluoai without biases": WRONG,
        "swigluoai with biases": WRONG,
        "an activation that is not known": WRONG,
    },
    "rope_buffer": {
        "torch.float32 asked for": Change(
            {"right": True, "buffer replaced in forward": True, "bytes of a row": 256},
            {"right": True, "buffer replaced in forward": False, "bytes of a row": 128},
        ),
        "torch.bfloat16 asked for": {"right": True, "buffer replaced in forward": False, "bytes of a row": 128},
    },
    "yarn_truncate": {"truncate": Change("got an unexpected keyword argument 'truncate'", [False, True])},
    "quantization_claim": {
        "mxfp4": Change("ascend", None),
        "mxfp4, with --quantization ascend": "ascend",
        "ascend": "ascend",
        "no method named": "ascend",
        "what the platform says of mxfp4": "mxfp4 quantization is currently not supported in npu.",
    },
}


def expected(name: str, repaired: bool) -> dict[str, Any]:
    values = EXPECTED[name].items()
    return {key: (v.after if repaired else v.before) if isinstance(v, Change) else v for key, v in values}


def observation(diff: Path) -> str:
    return diff.stem.partition("-")[2].replace("-", "_")


@pytest.fixture(scope="session")
def observed(emulated: Path, ascend_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each observation sees in the release, and with all diffs."""
    every, repaired = list(EXPECTED), tmp_path_factory.mktemp("vllm-ascend")
    trees.copied(ascend_site, repaired, *trees.ASCEND, fuzzy=True)
    jobs: dict[str, tuple[str | None, list[str]]] = {"released": (None, every), "repaired": (str(repaired), every)}
    run = subprocess.run(
        [str(emulated / "bin/python"), "-m", "tests.patches.in_fork"],
        input=json.dumps(list(jobs.values())),
        cwd=ROOT,
        env=environment(Machine(), emulated)
        | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "ascend"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    seen = dict(zip(jobs, map(json.loads, run.stdout.splitlines()), strict=True))
    assert all(seen.values()), run.stderr[-4000:]
    return seen


@pytest.mark.parametrize("diff", trees.ASCEND, ids=lambda diff: diff.stem)
def test_a_diff_applies_alone_and_repairs_its_defect_among_the_others(
    observed: dict[str, dict[str, Any]], ascend_site: Path, diff: Path
) -> None:
    """Alone it is only applied: a process for each would take most of the time."""
    name = observation(diff)
    assert observed["released"][name] == expected(name, repaired=False)
    assert observed["repaired"][name] == expected(name, repaired=True)
    alone = trees.apply(diff, ascend_site, "--check")
    assert alone.returncode == 0, alone.stderr


def test_a_diff_that_does_not_fit_is_refused(ascend_site: Path, tmp_path: Path) -> None:
    diff = next(diff for diff in trees.ASCEND if observation(diff) == "quantization_claim")
    changed = trees.copied(ascend_site, tmp_path / "copy") / trees.changed_file(diff)
    changed.write_text(changed.read_text().replace("override_quantization_method", "another_method"))
    assert trees.apply(diff, tmp_path / "copy").returncode != 0


@pytest.mark.slow
def test_stock_vllm_with_the_diffs_serves_gpt_oss_without_the_plugin(ascend_site: Path, tmp_path: Path) -> None:
    """The emulator's own tests show the garbage without them. `truncate`: vLLM 0.11.0 reads only true rightly."""
    repaired = trees.copied(ascend_site, tmp_path / "repaired", *trees.ASCEND, fuzzy=True)
    write_random_checkpoint(tmp_path / "checkpoint", vocab_size=VOCABULARY, truncate=True)
    rounds = [turn((5, 40, 200), tokens=2)]
    with importing(Machine(), NPU_GPTOSS="0", PYTHONPATH=str(repaired)) as process:
        serve = asking(process, tmp_path / "checkpoint", tmp_path)
        results, _ = serve(rounds, options={"dtype": "bfloat16", **EAGER})
    found = torch.cat(errors(rounds, results, of_oracle(load_oracle(tmp_path / "checkpoint")))[0])
    assert float(found.median()) < 0.05  # bfloat16's rounding; released: more than 0.5
    assert float(found.max()) < 0.5
