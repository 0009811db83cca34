"""offline.py gives stock vLLM's `LLM` the Ascend article's settings, and answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.shell import SCRIPTS, environment

sys.path.insert(0, str(SCRIPTS))
import offline


def dry(capsys: pytest.CaptureFixture, *options: str) -> str:
    assert offline.main(["--model", "openai/gpt-oss-20b", "--dry-run", *options]) == 0
    return capsys.readouterr().out


def test_the_defaults_are_the_articles(capsys: pytest.CaptureFixture) -> None:
    printed = dry(capsys)
    assert (
        "LLM(model='openai/gpt-oss-20b', tensor_parallel_size=1, max_model_len=16384, max_num_seqs=16, "
        "max_num_batched_tokens=4096, gpu_memory_utilization=0.95, "
        "compilation_config={'cudagraph_mode': 'PIECEWISE', 'cudagraph_capture_sizes': [16, 4, 2, 1]})"
    ) in printed
    assert "NPU_GPTOSS_PLATFORM" not in printed


def test_modes_and_places(capsys: pytest.CaptureFixture) -> None:
    assert "enforce_eager=True" in dry(capsys, "--mode", "eager")
    assert "FULL_DECODE_ONLY" in dry(capsys, "--mode", "full", "--cards", "4")
    on_cpu = dry(capsys, "--on", "cpu")
    assert "NPU_GPTOSS_PLATFORM=cpu" in on_cpu
    assert "enforce_eager=True" in on_cpu


def test_what_the_user_set_stays(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert "VLLM_CPU_KVCACHE_SPACE" not in dry(capsys, "--on", "cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "nowhere"), "neither a folder nor a name on the hub"),
        (("--model", "/no/such/folder"), "neither a folder nor a name on the hub"),
        (("--model", str(SCRIPTS)), "holds no config.json"),
        (("--model", "openai/gpt-oss-20b", "--on", "cpu", "--mode", "full"), "there are no graphs on a CPU"),
    ],
)
def test_what_cannot_run_is_refused_in_words(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert offline.main(list(options)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.serving
@pytest.mark.slow
def test_it_answers_and_writes_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    write_tiny(tmp_path / "model", trained=True)
    options = (
        "--model",
        tmp_path / "model",
        "--on",
        "cpu",
        "--prompt",
        "What is 3 + 4?",
        "--profile",
        tmp_path / "trace",
    )
    command = [sys.executable, str(SCRIPTS / "offline.py"), *map(str, options)]
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "thought: Let me think. 3 + 4 = 7." in done.stdout
    assert "answer: 3 + 4 = 7." in done.stdout
    traces = list((tmp_path / "trace").glob("*.pt.trace.json*"))
    assert traces
    assert all(trace.stat().st_size > 10_000 for trace in traces)


@pytest.mark.emulated
@pytest.mark.slow
def test_it_answers_with_captured_graphs_on_the_emulated_910b(tmp_path: Path) -> None:
    from npu_gptoss.tiny.checkpoint import write_tiny
    from tests.emulator.machine import emulate

    write_tiny(tmp_path / "model", trained=True)
    options = ("--model", tmp_path / "model", "--prompt", "What is 3 + 4?", "--max-len", 2048)
    script = str(SCRIPTS / "offline.py")
    done = emulate(script, *map(str, options), timeout=600, PYTHONPATH=str(SCRIPTS.parent))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert "Platform plugin ascend is activated" in said
    assert "Starting to capture ACL graphs for cases: [16, 4, 2, 1], mode: PIECEWISE" in said
    assert "answer: 3 + 4 = 7." in done.stdout
