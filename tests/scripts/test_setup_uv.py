"""uv installs what pip would: from the same places, by the same hashes; and pip does, where uv cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.setup import machine, uv
from scripts.setup.machine import Environment, Run, SetupError
from tests.scripts.shell import write_program

PYPI = "usual.index-url='https://an.index/simple'\n"


def test_uv_looks_where_pip_looks_and_first_in_the_index_that_has_every_wheel() -> None:
    """A version that two indexes have was taken from an additional one, which had no wheel for this machine of it."""
    said = PYPI + "global.extra-index-url='file:///a\\nfile:///b'\nglobal.find-links='/x'\n:env:.find-links='/y /z'\n"
    variables = uv.variables_for(said)
    assert variables["UV_INDEX"].split() == ["https://an.index/simple", "file:///a", "file:///b"]
    assert variables["UV_FIND_LINKS"] == "/y,/z"
    assert uv.variables_for(f"{PYPI}global.index-url='https://mine/'\n")["UV_DEFAULT_INDEX"] == "https://mine/"


@pytest.mark.parametrize("said", ["install.no-binary=':all:'\n", ":env:.no-index='1'\n", "global.pre='true'\n"])
def test_a_setting_of_pip_that_uv_does_not_have_keeps_pip(said: str) -> None:
    assert uv.variables_for(PYPI + "download.pre='true'\n:env:.progress-bar='off'\n") is not None
    assert uv.variables_for(PYPI + said) is None
    assert uv.variables_for("") is None, "a pip that does not say where it looks"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """uv and pip are scripts that tell what they were asked; the file `fails` names those that fail."""
    env = Environment(tmp_path / "venv", index_reached=True)
    monkeypatch.setattr(machine, "UV", tmp_path / "uv")
    (tmp_path / "fails").write_text("")
    for name, path in (("pip", env.python), ("uv", machine.UV / "bin/uv")):
        write_program(
            path,
            f'[ "$1" = -c ] && exec "{sys.executable}" "$@"\n'
            f'echo "{name} was asked: $@ ($UV_INDEX)" | tee -a {tmp_path}/asked\n! grep -q {name} {tmp_path}/fails',
        )
    (machine.UV / "made-for").write_text(machine.UV_LOCK.read_text())
    return env


def test_pip_installs_where_uv_fails_and_says_why_it_cannot_itself(
    env: Environment, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = Run(env, "a step", "a test")
    assert run.install("--no-deps", "numpy==2")
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith("uv was asked: pip install")
    assert f"--python {env.python} --no-deps numpy==2 (http" in asked
    (tmp_path / "fails").write_text("uv")
    assert run.install("numpy==2")
    assert "pip was asked: -m pip install" in (tmp_path / "asked").read_text().splitlines()[-1]
    assert "uv could not" in capsys.readouterr().out
    (tmp_path / "fails").write_text("uv pip")
    with pytest.raises(SetupError, match="pip was asked"):
        run.must_install("numpy==2")
    assert "uv was asked" not in run.logged(), "a second reason, for something that was tried another way"


def test_uv_is_had_by_its_hash_or_pip_installs(env: Environment, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (machine.UV / "made-for").write_text("an older lock")
    (tmp_path / "fails").write_text("pip")
    assert not Run(env, "a step", "a test").install("numpy==2")
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert "--require-hashes" in first
    assert first.split()[first.split().index("-r") + 1] == str(machine.UV_LOCK)
    assert "uv cannot be had" in capsys.readouterr().out
    assert "numpy==2" in second
    assert "pip was asked" in second
