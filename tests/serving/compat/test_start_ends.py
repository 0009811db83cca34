"""A start that fails ends with one sentence of the process that failed first, and its tracebacks in a file."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from npu_gptoss.errors import InputError, Refusal
from npu_gptoss.serving.compat.start import ends

# A server's processes without vLLM: the parent hears of its child's end only.
PROGRAM = """
import logging, multiprocessing, sys
from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.start import ends

def child(kind):
    ends.install()  # as the plugin does
    try:
        raise RuntimeError("--block-size=64 requires intel_extension_for_pytorch")
    except RuntimeError:
        if kind == "logged":
            logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
        else:
            raise

if __name__ == "__main__":
    sys.argv = ["vllm", *{arguments}]
    ends.install()
    if {kind!r} == "refused":
        raise InputError("--dtype half: no; use another.")
    started = multiprocessing.get_context({method!r}).Process(target=child, args=({kind!r},))
    started.start()
    started.join()
    raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


def ended(folder: Path, method: str, kind: str, command: str = "serve", **variables: str) -> list[str]:
    """Lines that the program writes before its end."""
    program = folder / "program.py"
    program.write_text(PROGRAM.format(arguments=[command], method=method, kind=kind))
    environment = os.environ | {"TMPDIR": str(folder)} | variables
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return (done.stdout + done.stderr).strip().splitlines()


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("kind", ["logged", "raised"])
def test_the_last_line_is_the_reason_of_the_first_process(tmp_path: Path, method: str, kind: str) -> None:
    *others, last = ended(tmp_path, method, kind)
    assert last.startswith("vllm serve: --block-size=64 requires intel_extension_for_pytorch. ")
    assert len(others) == 1
    (file,) = tmp_path.glob("npu-gptoss-*.txt")
    assert str(file) in others[0]
    assert file.stat().st_mode & 0o077 == 0, "a traceback may show a secret"
    assert file.read_text().count("Traceback") == 2


@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_a_refusal_is_one_line_without_a_file(tmp_path: Path, command: str) -> None:
    assert ended(tmp_path, "spawn", "refused", command) == [f"vllm {command}: --dtype half: no; use another."]
    assert list(tmp_path.glob("npu-gptoss-*.txt")) == []


def test_a_variable_shows_the_tracebacks_and_the_reason_last(tmp_path: Path) -> None:
    *others, last = ended(tmp_path, "spawn", "raised", NPU_GPTOSS_TRACEBACK="1")
    assert sum(line.startswith("Traceback") for line in others) == 2
    assert last.startswith("vllm serve: --block-size=64 ")


def test_a_program_that_uses_vllm_keeps_its_tracebacks(tmp_path: Path) -> None:
    lines = ended(tmp_path, "spawn", "raised", "my_program")
    assert sum(line.startswith("Traceback") for line in lines) == 2
    assert not any("vllm serve" in line for line in lines)


def test_a_folder_that_takes_no_file_loses_no_traceback(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv(ends.FILE, str(tmp_path / "not there" / "file.txt"))
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])
    error = RuntimeError("it broke")
    ends._end(RuntimeError, error, None)
    said = capsys.readouterr().err
    assert said.startswith("RuntimeError: it broke\n")
    assert said.endswith(f"vllm serve: it broke. {ends.REMEDY}.\n")
    ends._end(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "KeyboardInterrupt\n", "the user's own end has no remedy"


def test_a_file_that_another_process_has_just_made_holds_no_reason(monkeypatch, tmp_path) -> None:
    (tmp_path / "file.txt").touch()
    monkeypatch.setenv(ends.FILE, str(tmp_path / "file.txt"))
    assert ends._first() is None


def test_vllm_reports_a_failed_start_by_the_known_records() -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for function, words in ((EngineCoreProc.run_engine_core, "EngineCore"), (WorkerProc.worker_main, "WorkerProc")):
        assert f'logger.exception("{words} failed to start.")' in inspect.getsource(function)
        assert inspect.getmodule(function).logger.name in ends._LOGGERS
    assert ends._RECORDS[1] in inspect.getsource(sys.modules["vllm.v1.utils"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InputError(Refusal("--dtype", "half", "no such dtype", "use another")), "--dtype half: no such dtype; use"),
        (ModuleNotFoundError("No module named 'runai_model_streamer'"), "Install the package runai_model_streamer"),
        (ModuleNotFoundError("No module named 'vllm_ascend.mooncake'"), "Leave out the option that names vllm_ascend."),
        (ImportError("cannot import name 'a' from 'vllm.b.v1' (/c.py)"), "Leave out the option whose class imports it"),
        (ValueError("No x.\nOriginal error:\nTraceback (most recent call last):\n  File 'a'\nE: b"), "No x. Correct"),
        (OSError(98, "Address already in use"), "choose another --port"),
        (RuntimeError("HCCL … EJ0003: … Failed to bind the IP port. Reason: … bound already."), "_PORT_RANGE=60100"),
        (RuntimeError("HCCL … EI0006: … Getting socket times out. Reason: …"), "other ranks' logs"),
        (
            RuntimeError("NPU function error: aclrtMalloc, error code is 207001 … Failed to allocate memory."),
            "less memory",
        ),
        (RuntimeError("NPU function error: aclrtSetDevice, error code is 507033"), "npu-smi info"),
        (ModuleNotFoundError("No module named 'tbe'"), "set_env.sh of CANN"),
        (ImportError("libatb.so: cannot open shared object file: No such file or directory"), "set_env.sh of CANN"),
        (ModuleNotFoundError("No module named 'vllm_ascend.vllm_ascend_C'"), "made for each other"),
        (ImportError("/l/libgomp.so.1: cannot allocate memory in static TLS block"), "Set LD_PRELOAD=/l/libgomp.so.1"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 12020)."), "nvidia-smi"),
        (RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"), "first warning"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "knows this card"),
        (KeyError("getpwuid(): uid not found: 1000"), "/etc/passwd"),
        (OSError(13, "Permission denied", "/root/.cache/vllm"), "Let this user read and write it. VLLM_CACHE_ROOT"),
        (OSError(28, "No space left on device", "/psm_1a2b"), "--shm-size"),
        (OSError(24, "Too many open files"), "ulimit -n"),
        (RuntimeError("can't start new thread"), "--pids-limit"),
        (OSError(116, "Stale file handle", "/m/model.safetensors"), "that holds it"),
        (
            ValueError("World size (8) is larger than the number of available NPUs (4)"),
            "smaller --tensor-parallel-size",
        ),
        (OSError("We couldn't connect to 'https://huggingface.co'"), "hf download"),
        (RuntimeError("Failed to infer device type, please set X"), "let it name npu_gptoss_cpu"),
        (RuntimeError("core proc(s): {'EngineCore_DP0': -9}"), "less memory"),
        (
            ValueError("No such thing.\n\n  Please raise an issue. It is odd"),
            f"No such thing. It is odd. {ends.REMEDY}.",
        ),
        (KeyError("x"), "KeyError: 'x'. "),
        (OSError(28, "No space left on device"), "on device. Make room there. VLLM_CACHE_ROOT"),
        (OSError(30, "Read-only file system", "/x"), "'/x'. VLLM_CACHE_ROOT"),
        (ValueError("Invalid request on line 7: no"), "line 7: no. Correct or leave out that line"),
        (
            RuntimeError("Engine core process EngineCore_DP1 died unexpectedly."),
            "unexpectedly. Read its last log lines",
        ),
        (KeyError("invalid tool call parser: x (chose from { openai })"), "Use --tool-call-parser openai"),
        (RuntimeError("R1 reasoning parser could not locate its tokens!"), "its tokens. Use --tool-call-parser openai"),
        (ValueError("provide the model as a positional argument or in a config file"), "without --model"),
        (ValueError("max_model_len (9) is greater than the derived max_model_len (8)"), "Use a --max-model-len of"),
        (AttributeError("'int' object has no attribute 'items'"), "Give an object in braces"),
        (AssertionError(("only ray or mp, got %s", "x")), "only ray or mp, got x. "),
    ],
)
def test_a_reason_is_one_line_with_a_remedy(error: Exception, words: str) -> None:
    said = ends.sentence(error)
    assert words in said
    assert "\n" not in said
    assert re.search(r"\w\.$", said)


def test_a_variable_or_file_that_python_does_not_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4GB")
    monkeypatch.setattr(sys, "argv", ["/bin/sh", "serve", "--uds=/missing/socket"])
    assert "VLLM_CPU_KVCACHE_SPACE" in ends.sentence(ValueError("invalid literal for int() with base 10: '4GB'"))
    assert "/missing/socket" in ends.sentence(FileNotFoundError(2, "No such file or directory"))
    assert "/missing" not in ends.sentence(FileNotFoundError(2, "No such file or directory", "/other"))


class Failing(BaseModel):
    value: int

    @model_validator(mode="after")
    def check(self) -> Failing:
        if self.value < 2:
            raise AssertionError  # as Python does outside of tests, which spell it out
        return self


def test_a_bare_assertion_shows_its_source(tmp_path: Path) -> None:
    file = tmp_path / "checks.py"
    file.write_text("def check(value):\n    assert value > 2\ncheck(1)")
    with pytest.raises(AssertionError) as caught:
        exec(compile(file.read_text(), file, "exec"), {})
    assert ends.sentence(caught.value).startswith("AssertionError: assert value > 2. ")
    with pytest.raises(ValidationError) as wrapped:
        Failing(value=1)
    assert ends.sentence(wrapped.value).startswith("raise AssertionError ")


def test_a_wrong_flag_ends_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """pydantic's address came last."""
    wrong = (
        "argument -cc: 1 error\n  no such field\n    For further information visit https://errors.pydantic.dev/2/v/x"
    )
    with pytest.raises(SystemExit):
        ends._usage(argparse.ArgumentParser("vllm"), argparse.ArgumentParser.error, wrong)
    assert capsys.readouterr().err.endswith("argument -cc: 1 error no such field\n")
