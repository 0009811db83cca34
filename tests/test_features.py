"""docs/features.md and docs/story-of-the-port.md name evidence that is there, and leave no row and no problem out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.evidence import ROOT, looks_like_tests, objection, objections, spans
from tests.markdown import PAGES

FEATURES = (ROOT / "docs/features.md").read_text(encoding="utf-8")
STORY = (ROOT / "docs/story-of-the-port.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([PFATX]\d+) \| (.+?) \| (yes|partly|no) \| (.*) \|$", FEATURES, re.M)
# capabilities that the five descriptions have, by the letter of their section
COUNTS = {"P": 37, "F": 18, "A": 28, "T": 39, "X": 16}
PROBLEMS = re.split(r"^## ", STORY, flags=re.M)[1:]


def test_each_capability_has_its_row_once() -> None:
    assert [number for number, *_ in ROWS] == [f"{letter}{n + 1}" for letter in COUNTS for n in range(COUNTS[letter])]
    lines = [line for line in FEATURES.splitlines() if re.match(r"\| [A-Z]\d", line)]
    assert len(lines) == len(ROWS), "a row that is not written as the others"


@pytest.mark.parametrize(("number", "state", "shown"), [pytest.param(n, s, t, id=n) for n, _, s, t in ROWS])
def test_what_a_row_names_exists(number: str, state: str, shown: str) -> None:
    assert objections(shown) == {}
    words = re.sub(r"`[^`]+`|\[[^]]*\]\([^)]*\)|\W", "", shown)
    assert spans(shown) or state == "no", f"{number}: nothing shows it"
    assert words or state == "yes", f"{number}: no word on what is missing"


@pytest.mark.parametrize(
    ("number", "size", "context", "batch", "layouts"),
    [
        ("X16", "20b", 1024, 1, ("tp1", "tp2")),
        ("X16", "120b", 1024, 1, ("tp1", "tp2")),
        ("P37", "20b", 8192, 8, ("ep4", "tp1")),
        ("P37", "20b", 8192, 1, ("ep4", "tp1")),
    ],
)
def test_speeds_are_those_of_the_committed_sweep(
    number: str, size: str, context: int, batch: int, layouts: tuple[str, ...]
) -> None:
    sweep = json.loads((ROOT / f"docs/benchmarks/sweep_{size}/decode.json").read_text(encoding="utf-8"))
    found = {r["layout"]: r["tpot_ms"] for r in sweep["records"] if (r["context"], r["batch"]) == (context, batch)}
    (shown,) = (text for name, _, _, text in ROWS if name == number)
    assert [f"{1e3 / found[layout]:.0f}" for layout in layouts if f"{1e3 / found[layout]:.0f}" not in shown] == []


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda text: text.partition("\n")[0])
def test_what_the_story_names_exists(problem: str) -> None:
    named = looks_like_tests(problem)
    assert named, "no test reproduces it"
    assert {name: objection(name) for name in named if objection(name)} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """Folders of tests are left to the eye."""
    named = looks_like_tests(page.read_text(encoding="utf-8"))
    assert {name: wrong for name in named if not (ROOT / name).is_dir() and (wrong := objection(name))} == {}


def test_the_story_has_the_six_problems_and_says_how_each_ends() -> None:
    numbered = [problem for problem in PROBLEMS if re.match(r"\d\. ", problem)]
    assert [problem[0] for problem in numbered] == list("123456")
    for problem in numbered:
        assert re.findall(r"^\*(.+?):\*", problem, re.M) == ["The article", "Cause", "Here", "Tests"]
        assert looks_like_tests(problem.partition("*Tests:*")[2])


@pytest.mark.parametrize(
    ("span", "why"),
    [
        ("tests/test_features.py::test_that_nobody_wrote", "has no test_that_nobody_wrote"),
        ("tests/moe/test_cli.py::test_version", "there is no tests/moe/test_cli.py"),
        ("tests/test_cli.py::test_what_a_row_names_exists", "has no test_what_a_row"),
        ("tests/emulator/test_graphs.py::test_graph[case_that_nobody_wrote]", "no case_that_nobody_wrote"),
        ("test_that_nobody_wrote", "in tests/"),
        ("tests/test_that_nobody_wrote.py", "there is no"),
        ("docs/nothing.md", "there is no docs/nothing.md"),
        ("docker/nothing.Dockerfile", "there is no docker/nothing.Dockerfile"),
        ("scripts/lib.sh", "cannot be executed"),
        ("make tea", "the Makefile has no tea"),
        ("npu-gptoss sing", "no command 'sing'"),
        ("npu-gptoss verify --mutilate", "unrecognized arguments: --mutilate"),
        ("npu-gptoss bench sweat", "invalid choice: 'sweat'"),
        ("npu-gptoss bench decode --batch many --model DIR", "expected a whole number from 1, got 'many'"),
        ("sliding_window", "neither a test"),
        ("vllm serve", "neither a test"),
    ],
)
def test_what_is_unknown_is_told(span: str, why: str) -> None:
    assert why in (objection(span) or "nothing is wrong")


@pytest.mark.parametrize(
    "span",
    [
        "tests/test_cli.py::test_version",
        "tests/emulator/test_graphs.py::test_graph[case_R82_item]",
        "case_R82_item",
        "test_cli.py",
        "docs/emulator.md",
        "docker/910b.Dockerfile",
        "scripts/serve.sh",
        "make test-cuda",
        "npu-gptoss verify --mutate",
    ],
)
def test_what_is_there_is_taken(span: str) -> None:
    assert objection(span) is None
