"""docs/configuration.md says what the code says; what vLLM says is in test_options.py."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from npu_gptoss import envs
from scripts.docs import configuration_page
from scripts.serve_cpu import cpu_environment, serve_command
from tests.markdown import ROOT

PAGE = ROOT / "docs/configuration.md"
TEXT = PAGE.read_text(encoding="utf-8")
# (options of the row, vLLM's default, serve.sh, make serve), as the table has them
OPTIONS = [
    (re.findall(r"`(--[\w-]+)`", cells[0]), *(cell.strip() for cell in cells[1:4]))
    for cells in (
        re.split(r"(?<!\\)\|", line)[1:-1]
        for line in TEXT.partition("## Options of `vllm serve`")[2].splitlines()
        if line.startswith("| `--")
    )
]


def test_the_page_is_up_to_date() -> None:
    assert configuration_page.TABLES.written(TEXT) == TEXT, "python scripts/docs/configuration_page.py --write"


def test_every_variable_stands_in_the_page_with_its_default_and_meaning() -> None:
    for variable in envs.VARIABLES.values():
        (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{variable.name}` |")]
        assert variable.meaning in row


def test_a_variable_that_the_page_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    new = envs.Variable("NPU_GPTOSS_NEW", str, "", "something new")
    monkeypatch.setitem(envs.VARIABLES, new.name, new)
    assert "| `NPU_GPTOSS_NEW` | text | unset | something new |" in configuration_page.TABLES.written(TEXT)


def flags(words: list[str]) -> dict[str, str]:
    """Options of a command with their values, "" for switches."""
    found = {}
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if value.startswith("--") else value
    return found


def passed(flag: str, given: dict[str, str]) -> str:
    return ("on" if given[flag] == "" else given[flag]) if flag in given else "–"


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row[0][0])
def test_what_the_scripts_pass_is_what_the_table_says(row: tuple[list[str], str, str, str]) -> None:
    dry = ["sh", str(ROOT / "scripts/serve.sh"), "--model", "openai/gpt-oss-20b", "--dry-run"]
    printed = subprocess.run(dry, capture_output=True, text=True, check=True).stdout
    article = flags(shlex.split(printed))
    ours = flags(serve_command(Path("DIR"), "name", "127.0.0.1", 8000, []))
    options, _, serve_sh, make_serve = row
    for told, given in ((serve_sh, article), (make_serve, ours)):
        values = [passed(option, given) for option in options]
        if "--compilation-config" in options and given is article:
            assert all(word in values[0] for word in ("PIECEWISE", "16,10,4,2,1"))
            assert "PIECEWISE, sizes 16,10,4,2,1" in told
        elif told.startswith("`--"):  # another option of the script sets it
            assert values == ["–"]
            more = subprocess.run([*dry, *shlex.split(told.strip("`"))], capture_output=True, text=True, check=True)
            assert options[0] in flags(shlex.split(more.stdout))
        else:
            assert told.partition(";")[0].split(", ") == values, options


@pytest.mark.parametrize(
    "row",
    [
        (["--max-model-len"], "", "16384", "16384"),
        (["--max-num-seqs"], "", "–", "–"),
        (["--enforce-eager"], "", "on", "–"),
        (["--enforce-eager"], "", "`--mode piecewise`", "–"),
        (["--compilation-config"], "", "PIECEWISE, sizes 8,4,2,1", "–"),
    ],
)
def test_another_value_in_the_table_would_be_seen(row: tuple[list[str], str, str, str]) -> None:
    with pytest.raises(AssertionError):
        test_what_the_scripts_pass_is_what_the_table_says(row)


def test_the_table_has_every_option_that_the_scripts_pass() -> None:
    printed = serve_command(Path("DIR"), "name", "127.0.0.1", 8000, [])
    named = {option for options, *_ in OPTIONS for option in options}
    assert set(flags(printed)) - {"--served-model-name"} <= named
    assert len(named) >= 15


def test_every_variable_that_make_serve_sets_stands_with_its_reason() -> None:
    page = (ROOT / "docs/serving-on-cpu.md").read_text(encoding="utf-8")
    table = page.partition("and in the environment\n\n")[2].partition("\n\n")[0]
    named = re.findall(r"`([A-Z_]+)`", "".join(line.split("|")[1] for line in table.splitlines()))
    assert set(named) == set(cpu_environment(Path("DIR"), Path("DIR"), {}))
