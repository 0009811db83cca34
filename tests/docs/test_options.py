"""Options that the pages name exist: those of `vllm serve` in vLLM's own parser, ours in ours."""

from __future__ import annotations

import pytest

from tests.docs.parsing import known_options, vllm_lines, vllm_says
from tests.docs.shell import all_commands, inline, options
from tests.docs.test_configuration import OPTIONS
from tests.markdown import PAGES, ROOT

pytestmark = [pytest.mark.serving, pytest.mark.slow]
MISTAKE = ["DIR", "--max-model-length", "1"]
# of pytest, pip, docker, evalscope and certbot
FOREIGN = {
    "--pdb",
    *("--constraint", "--no-deps", "--require-hashes"),
    *("--privileged", "--build", "--restart"),
    *("--use-cache", "--warmup-num"),
    "--nginx",
}


@pytest.fixture(scope="module")
def vllm() -> tuple[dict[str, str], dict[str, str]]:
    """What vLLM's parser refuses of all `vllm serve` of all pages and of a mistake; its defaults."""
    pytest.importorskip("vllm")
    fenced = [command.text for command in all_commands()]
    sentences = [span for page in PAGES for _, span in inline(page.read_text(encoding="utf-8"))]
    lines = vllm_lines([*fenced, *sentences])
    assert len(lines) >= 3
    return vllm_says([*lines, MISTAKE])


def test_vllms_own_parser_takes_every_command_of_every_page(vllm: tuple[dict[str, str], dict[str, str]]) -> None:
    wrong, _ = vllm
    assert set(wrong) == {" ".join(MISTAKE)}, wrong


def test_every_option_that_a_sentence_or_a_table_names_exists(vllm: tuple[dict[str, str], dict[str, str]]) -> None:
    """A renamed option would else live on in the tables of options."""
    _, defaults = vllm
    known = known_options() | set(defaults) | FOREIGN
    assert {"--mutate", "--capture-sizes", "--few-shot", "--share-experts", "--max-model-len", "--cards"} <= known
    assert not {"--mutilate", "--max-model-length"} & known
    named = [
        (f"{page.relative_to(ROOT).as_posix()}:{line}", option)
        for page in PAGES
        for line, option in options(page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 150
    assert {option for _, option in named} >= FOREIGN, "options of others that no page names any more"
    assert [f"{place}: {option}" for place, option in named if option not in known] == []


def test_options_are_found_in_sentences_and_not_in_blocks() -> None:
    text = "Take `--one` and `x --two=2`.\n\n```sh\nx --three\n```\n\n| `--four\\|five` |\n"
    assert options(text) == [(1, "--one"), (1, "--two"), (7, "--four")]


def test_defaults_in_the_table_are_those_of_vllms_parser(vllm: tuple[dict[str, str], dict[str, str]]) -> None:
    """Where the parser has one; the others follow from the model and the hardware, in words."""
    _, defaults = vllm
    said = {"off": "False", "none": "None", "all addresses": "None", "on": "None", "auto: bfloat16": "auto"}
    for row, told_of_all, *_ in OPTIONS:
        for option, told in zip(row, told_of_all.split(", ") if len(row) > 1 else [told_of_all], strict=True):
            assert option in defaults, f"vLLM has no {option}"
            if defaults[option] != "None" and option != "--compilation-config":  # else not the parser's to say
                assert defaults[option] == said.get(told, told), option
