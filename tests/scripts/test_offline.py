"""offline.py gives stock vLLM's `LLM` the Ascend article's settings, and answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from npu_gptoss.serving.releases import RELEASES
from scripts import offline
from tests.scripts.shell import SCRIPTS, environment

HUB = "--model openai/gpt-oss-20b"
ARTICLE = (
    "LLM(model='openai/gpt-oss-20b', tensor_parallel_size=1, max_model_len=16384, max_num_seqs=16, "
    "max_num_batched_tokens=4096, gpu_memory_utilization=0.95, "
    "compilation_config={'cudagraph_capture_sizes': [16, 4, 2, 1]})"
)


@pytest.mark.parametrize(
    ("options", "printed", "not_printed"),
    [
        ("", ARTICLE, "NPU_GPTOSS_PLATFORM"),
        ("--mode eager", "enforce_eager=True", "cudagraph"),
        ("--mode full --cards 4", "FULL_DECODE_ONLY", "eager"),
        ("--on cpu", "NPU_GPTOSS_PLATFORM=cpu", "cudagraph"),
        ("--on cpu", "enforce_eager=True", "VLLM_CPU_KVCACHE_SPACE"),  # which the user has set
    ],
)
def test_the_settings_of_a_dry_run(options, printed, not_printed, capsys, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert offline.main([*HUB.split(), "--dry-run", *options.split()]) == 0
    said = capsys.readouterr().out
    assert printed in said
    assert not_printed not in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model nowhere", "--model nowhere"),
        ("--model /no/such/folder", "--model /no/such/folder"),
        (f"--model {SCRIPTS}", "config.json"),
        (f"{HUB} --on cpu --mode full", "--mode full"),
    ],
)
def test_an_impossible_run_is_refused_by_name(options: str, words: str, capsys: pytest.CaptureFixture) -> None:
    assert offline.main(options.split()) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("release", ["0.11", "0.23", "0.33"])
def test_a_profiler_is_not_asked_for_as_its_release_reads_it(release, tmp_path, monkeypatch, capsys) -> None:
    """vLLM 0.23 and later do not look at VLLM_TORCH_PROFILER_DIR."""
    (line,) = (row for row in RELEASES if row.name == release)
    monkeypatch.setattr(offline, "here", lambda: line)
    assert offline.main([*HUB.split(), "--dry-run", "--profile", str(tmp_path)]) == 0
    asked = f"profiler_config={{'profiler': 'torch', 'torch_profiler_dir': '{tmp_path}'}}"
    assert (asked in capsys.readouterr().out) is (release != "0.11")


def test_a_trace_that_was_not_written_is_counted(tmp_path: Path) -> None:
    (tmp_path / "older").write_text("a trace of before")
    llm = SimpleNamespace(start_profile=lambda: None, stop_profile=lambda: None)
    assert offline.profiled(llm, tmp_path, lambda: 7) == (7, 0)
    llm.stop_profile = lambda: (tmp_path / "profiler_metadata.json").write_text("{}")  # of torch_npu, on the emulator
    assert offline.profiled(llm, tmp_path, lambda: 7) == (7, 0)
    llm.stop_profile = lambda: (tmp_path / "new.json").write_text("a trace")
    assert offline.profiled(llm, tmp_path, lambda: 7) == (7, 1)


@pytest.mark.serving
@pytest.mark.slow
def test_it_answers_and_writes_a_trace(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from npu_gptoss.tiny.checkpoint import write_tiny

    write_tiny(tmp_path / "model", trained=True)
    where = ["--model", str(tmp_path / "model"), "--on", "cpu", "--profile", str(tmp_path / "trace")]
    options = [*where, "--prompt", "What is 3 + 4?", "--max-len", "1024"]
    command = [sys.executable, str(SCRIPTS / "offline.py"), *options]
    variables = {**environment(), "OMP_NUM_THREADS": "1", "VLLM_TORCH_PROFILER_WITH_STACK": "0"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "thought: Let me think. 3 + 4 = 7." in done.stdout
    assert "answer: 3 + 4 = 7." in done.stdout
    traces = list((tmp_path / "trace").glob("*.pt.trace.json*"))
    assert traces
    assert all(trace.stat().st_size > 10_000 for trace in traces)
