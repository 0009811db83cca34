"""Engines of stock vllm-ascend on the emulated 910B, in strict mode, asked from here: `serve` for 0.11.0.

Each engine is a process in the emulated environment (`on_ascend.py`), forked from a process with all imports done.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.launch import Machine, environment

from emulator.tests.machine import ROOT, venv
from emulator.tests.test_triton import PACKAGES
from tests.checkpoints import new_checkpoint
from tests.oracle import load_oracle, oracle_logits
from tests.serving.emulated.rounds import VOCABULARY

SCRIPT = Path(__file__).with_name("on_ascend.py")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.emulated)
    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory, vocab_size=VOCABULARY)


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Any:
    """(prompt, answer) -> [tokens, vocabulary]: log-probabilities of transformers in fp32 for the answer's tokens."""
    return of_oracle(load_oracle(checkpoint))


def of_oracle(model: Any) -> Any:
    @functools.cache
    def logprobs(prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        return torch.log_softmax(oracle_logits(model, prompt + answer[:-1])[len(prompt) - 1 :], -1)

    return logprobs


@contextlib.contextmanager
def importing(machine: Machine, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The process in which vLLM is imported, on this machine."""
    place = venv(machine)
    variables = {
        **environment(machine, place),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'emulator'}",  # this checkout's packages
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        **more,
    }
    process = subprocess.Popen(
        [str(place / "bin/python"), str(SCRIPT)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said = []
        while (line := process.stdout.readline()) not in ("READY\n", ""):
            said.append(line)
        assert line, "".join(said)
        yield process
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def ascend() -> Iterator[subprocess.Popen[str]]:
    with importing(Machine(devices=8)) as process:
        yield process


@pytest.fixture(scope="session")
def ascend_9_1() -> Iterator[subprocess.Popen[str]]:
    """With Triton-Ascend, as every card of this stack has it, unless its compiler is not set up."""
    with importing(Machine("9.1", devices=8, triton=PACKAGES if PACKAGES.is_dir() else None)) as process:
        yield process


@pytest.fixture
def serve(ascend: subprocess.Popen[str], checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[list[Any], str]]:
    return asking(ascend, checkpoint, tmp_path)


@pytest.fixture
def serve_9_1(
    ascend_9_1: subprocess.Popen[str], checkpoint: Path, tmp_path: Path
) -> Callable[..., tuple[list[Any], str]]:
    """Engines of vllm-ascend 0.23.0 on vLLM 0.23.0."""
    return asking(ascend_9_1, checkpoint, tmp_path)


@pytest.fixture
def serve_on(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., tuple[list[Any], str]]]:
    """`serve` by the release of CANN."""
    return lambda cann: request.getfixturevalue({"8.3": "serve", "9.1": "serve_9_1"}[cann])


def asking(ascend: subprocess.Popen[str], checkpoint: Path, tmp_path: Path) -> Callable[..., tuple[list[Any], str]]:
    def run(
        rounds: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = None,
        machine: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        model: Path = checkpoint,
        spoil: str | None = None,
        canary: bool = False,
        checked: bool = False,
    ) -> tuple[list[Any], str]:
        """The answers of each round, or the text of the error that ended it; and the output.

        checked: the start check runs. It does on a machine with defects and in an engine with a mistake, too.
        """
        settings = {
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1100,
            "gpu_memory_utilization": 0.5,
            "num_gpu_blocks_override": 256,  # all memory of the device takes a second to fill
            **(options or {}),
        }
        diagnostic = settings["dtype"] == "float32"
        emulated = {"diagnostic_fp32": diagnostic, **(machine or {})}
        in_process = {} if "data_parallel_size" in settings else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        out, log, path = (tmp_path / name for name in ("out.json", "log", "job.json"))
        job = {
            "checkpoint": str(model),
            "options": settings,
            "rounds": rounds,
            "spoil": spoil,
            "canary": canary,
            "checked": checked or spoil is not None or "defects" in emulated,
            "machine": emulated,
            "variables": {
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                "ASCEND_EMULATOR_FP32": str(int(emulated["diagnostic_fp32"])),
                **in_process,
                **(variables or {}),
            },
            "vocabulary": VOCABULARY,
            "log": str(log),
            "out": str(out),
        }
        out.unlink(missing_ok=True)  # of an earlier engine of the same test
        path.write_text(json.dumps(job))
        print(path, file=ascend.stdin, flush=True)
        answer = ascend.stdout.readline()
        printed = log.read_text() if log.exists() else ""
        assert answer == "DONE\n", f"the process ended: {answer}{printed[-6000:]}"
        assert out.exists(), f"nothing was served:\n{printed[-12000:]}"
        return json.loads(out.read_text()), printed

    return run
