from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_gptoss import cli, envs, kernels
from npu_gptoss.kernels.registry import BUILT_IN, registry
from tests.refused import refused

PACKAGE = Path(envs.__file__).parent


def test_every_variable_that_the_code_names_stands_in_the_table():
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"NPU_GPTOSS_[A-Z0-9_]*[A-Z0-9]", path.read_text()):
            override = f"{name}_".startswith(envs.KERNEL_OVERRIDE_PREFIX)
            assert name in envs.VARIABLES or override, f"{path}: {name}"


def test_every_variable_of_the_table_is_read_somewhere():
    text = "".join(p.read_text() for p in PACKAGE.rglob("*.py") if p.name != "envs.py")
    for name in envs.VARIABLES:
        assert f'"{name}"' in text, f"{name} is in the table, but nothing reads it"


@pytest.mark.parametrize(
    ("text", "means"),
    [(text, True) for text in ("1", "true", "yes", "on", "True", " ON ")]
    + [(text, False) for text in ("0", "false", "no", "off", "False", " Off ", "")],
)
def test_switches_take_usual_spellings(monkeypatch, text, means):
    monkeypatch.setenv("NPU_GPTOSS_DISABLE_PLUGINS", text)
    assert envs.get("NPU_GPTOSS_DISABLE_PLUGINS") is means


def test_what_is_on_by_default_is_the_package_and_what_the_card_decides(monkeypatch):
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    on = {name for name in envs.VARIABLES if envs.get(name) and type(envs.get(name)) not in (int, float)}
    assert on == {"NPU_GPTOSS", "NPU_GPTOSS_EXPERT_FORMAT", "NPU_GPTOSS_EXPERT_WEIGHTS"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NPU_GPTOSS_DISABLE_PLUGINS", "maybe"),
        # each of these limits would stop all requests
        *(("NPU_GPTOSS_MAX_N", text) for text in ("0", "-1", "1.5", "many", "9999999999")),
    ],
)
def test_a_value_that_does_not_parse_is_an_error_in_words(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with refused(name):
        envs.get(name)


def test_names_are_split_at_commas(monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_SKIP_PATCHES", " a, , b ,,")
    assert envs.get("NPU_GPTOSS_SKIP_PATCHES") == ("a", "b")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NPU_GPTOSS_TYPO", "is no variable"),
        ("NPU_GPTOSS_DISABLE_PLUGIN", "NPU_GPTOSS_DISABLE_PLUGINS may be meant"),
        ("NPU_GPTOSS_KERNEL_ATTENTION_DECODE", "names no operation"),
        ("NPU_GPTOSS_KERNEL_MOE_EXPERT", "NPU_GPTOSS_KERNEL_MOE_EXPERTS may be meant"),
        ("NPU_GPTOSS_KERNEL_X_Y", "only if another package"),
        ("NPU_GPTOSS_\x1b[2J", "is no variable"),
    ],
)
def test_an_unread_variable_is_reported(name, words):
    (sentence,) = envs.unknown({name: "1", "HOME": "/"})
    assert words in sentence
    assert sentence.isprintable()


def test_no_variable_of_ours_counts_as_misspelt():
    kernels.load_kernels()
    own = {f"{k.family}_{k.mode}".upper() for k in registry.kernels.values() if k.origin == BUILT_IN}
    assert own == set(envs.KERNEL_OPERATIONS)
    names = {f"{envs.KERNEL_OVERRIDE_PREFIX}{operation}" for operation in envs.KERNEL_OPERATIONS}
    assert envs.unknown(dict.fromkeys({*envs.VARIABLES, *names}, "1")) == []


def test_commands_report_a_misspelt_variable(monkeypatch, capsys):
    monkeypatch.setenv("NPU_GPTOSS_TYPO", "1")
    cli.main(["kernels", "list"])
    assert "NPU_GPTOSS_TYPO is no variable" in capsys.readouterr().err
