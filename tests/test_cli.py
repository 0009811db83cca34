from __future__ import annotations

import importlib

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
