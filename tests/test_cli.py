from __future__ import annotations

import importlib
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from npu_gptoss.cli import COMMANDS, main


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_and_explains_itself(name, capsys):
    assert callable(importlib.import_module(COMMANDS[name][0]).run)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"npu-gptoss {name}" in capsys.readouterr().out


def test_an_unknown_command_lists_the_known_ones(capsys):
    assert main(["serve"]) == 2
    assert f"there is no command 'serve'; the commands are {', '.join(COMMANDS)}" in capsys.readouterr().err


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("npu-gptoss 0.")


def test_a_closed_pipe_gives_no_traceback():
    script = "import sys; sys.stdin.readline(); from npu_gptoss.cli import main; sys.exit(main([]))"
    command = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    command.stdout.close()  # as `| head` does; only then may it write
    command.stdin.write("\n")
    command.stdin.close()
    assert command.stderr.read() == ""
    assert command.wait() == 0


@pytest.mark.parametrize(("output", "code", "told"), [("/dev/full", 2, "the disk is full"), ("&-", 0, "")])
def test_output_that_nobody_takes_gives_a_traceback(output: str, code: int, told: str) -> None:
    command = [sys.executable, "-m", "npu_gptoss.cli"]
    done = subprocess.run(["sh", "-c", f'"$@" >{output}', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == code
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == bool(told)


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(importlib.import_module(COMMANDS["doctor"][0]), "run", Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "npu-gptoss: stopped\n"


def test_without_openai_harmony_a_chat_command_ends_with_a_sentence(monkeypatch, capsys) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'openai_harmony'", name="openai_harmony")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert main(["generate"]) == 2
    assert "pip install oss-harmony" in capsys.readouterr().err


def test_a_torch_npu_without_its_driver_ends_a_command_with_a_sentence(tmp_path):
    """In the 910B's image without a card, torch loads torch_npu by itself, for instance in `kernels explain`."""
    (tmp_path / "broken.py").write_text("raise ImportError('libascend_hal.so: cannot open shared object file')")
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "broken-1.0.dist-info/METADATA").write_text("Name: broken\nVersion: 1.0\n")
    (tmp_path / "broken-1.0.dist-info/entry_points.txt").write_text("[torch.backends]\nbroken = broken:load\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "npu_gptoss.cli", "kernels", "list"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "libascend_hal.so" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr
    assert "Traceback" not in done.stderr
