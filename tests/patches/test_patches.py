"""The diffs of `patches/`: each applies to the release that it names, and takes away the defect that it is about.

The released package is linked into a temporary folder, the changed files are copies, and what a client sees is observed
in a fork that imports the package from there, without our plugin; vllm-ascend's on the emulated 910B.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_gptoss.emulator.launch import Machine, environment
from npu_gptoss.serving.compat import PATCHES as WORKAROUNDS
from tests.patches import trees
from tests.patches.expected import EXPECTED, EXPECTED_ON_ASCEND, Change, expected

ROOT = Path(__file__).resolve().parents[2]
VLLM, ASCEND = trees.pages("vllm"), trees.pages("vllm-ascend")
SECTIONS = ("Symptom", "Cause", "Change", "What stays")
README = (trees.PATCHES / "README.md").read_text()


def table_of(heading: str) -> list[list[str]]:
    """The cells of the table under a heading of the README, without its header."""
    text = README.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def make_copies(pages: list[trees.Page], site: Path, top: Path) -> dict[str, Path]:
    """Diff -> a folder with the released package and that diff; "all" -> one with all of them, in their order."""
    result = {}
    for name, applied in [*((page.name, [page]) for page in pages), ("all", pages)]:
        folder = top / name.replace("/", "-")
        trees.copy_for([page.diff for page in applied], site, folder)
        for page in applied:
            # alone it must fit exactly; together, the diffs may stand in each other's context
            done = trees.apply(page.diff, folder, *(["-C1"] if name == "all" else []))
            assert done.returncode == 0, done.stderr
        result[name] = folder
    return result


Seen = dict[str, dict[str, Any]]  # name of a copy, or "released" -> observation -> what was seen


def observe(
    python: str | Path, package: str, module: str, jobs: dict[str, tuple[str | None, list[str]]], **variables: str
) -> Seen:
    run = subprocess.run(
        [str(python), "-m", "tests.patches.in_fork", package, module],
        input=json.dumps(list(jobs.values())),
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(zip(jobs, map(json.loads, run.stdout.splitlines()), strict=True))


def jobs_for(pages: list[trees.Page], copies: dict[str, Path], every: list[str]) -> dict[str, tuple[str | None, list]]:
    """The released package and all diffs together with every observation, each diff alone with its own."""
    alone = {page.name: (str(copies[page.name]), [page.observation]) for page in pages}
    return {"released": (None, every), **alone, "all": (str(copies["all"]), every)}


@pytest.fixture(scope="session")
def copies(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_copies(VLLM, site, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def ascend_copies(ascend_site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_copies(ASCEND, ascend_site, tmp_path_factory.mktemp("vllm-ascend"))


@pytest.fixture(scope="session")
def observed(copies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    pytest.importorskip("openai_harmony")
    pytest.importorskip("bpe_openai")
    from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE
    from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary

    vocabulary = tmp_path_factory.mktemp("vocabulary")
    (vocabulary / VOCABULARY_FILE).write_bytes(packaged_vocabulary())
    jobs = jobs_for(VLLM, copies, list(EXPECTED))
    jobs["all, with our plugin"] = (str(copies["all"]), ["with_our_plugin"])
    return observe(
        sys.executable,
        "vllm",
        "observations",
        jobs,
        # the platform's plugin only, so that vLLM knows where it runs: our patches are another plugin
        **os.environ | {BASE_VARIABLE: str(vocabulary), "VLLM_PLUGINS": "npu_gptoss_cpu"},
    )


@pytest.fixture(scope="session")
def observed_on_ascend(emulated: Path, ascend_copies: dict[str, Path]) -> Seen:
    jobs = jobs_for(ASCEND, ascend_copies, list(EXPECTED_ON_ASCEND))
    variables = environment(Machine(), emulated) | {"VLLM_PLUGINS": "ascend"}
    return observe(emulated / "bin/python", "vllm_ascend", "observations_ascend", jobs, **variables)


@pytest.mark.serving
@pytest.mark.parametrize("page", VLLM, ids=lambda page: page.name)
def test_a_diff_takes_its_defect_away(observed: Seen, page: trees.Page) -> None:
    name = page.observation
    assert any(isinstance(value, Change) for value in EXPECTED[name].values())
    assert observed["released"][name] == expected(EXPECTED[name], repaired=False)
    assert observed[page.name][name] == expected(EXPECTED[name], repaired=True)


@pytest.mark.serving
@pytest.mark.parametrize("name", EXPECTED)
def test_all_diffs_together_take_every_defect_away(observed: Seen, name: str) -> None:
    assert observed["all"][name] == expected(EXPECTED[name], repaired=True)


@pytest.mark.serving
def test_the_plugin_serves_on_a_vllm_that_has_the_diffs(observed: Seen) -> None:
    seen = observed["all, with our plugin"]["with_our_plugin"]
    four = {"content": "Four.", "reasoning": "hm", "calls": []}
    right = {"whole": four, "streamed": [four] * 3, "response": ["reasoning", "message"], "items": 2}
    steps_aside = set(seen.pop("steps aside"))
    assert seen == dict.fromkeys(seen, right)
    assert "a header that is spelled badly" in seen
    retired = {name for page in VLLM for name in page.retires}
    assert steps_aside <= retired
    assert "reasoning-end" in steps_aside


@pytest.mark.emulated
@pytest.mark.parametrize("page", ASCEND, ids=lambda page: page.name)
def test_a_diff_for_ascend_takes_its_defect_away(observed_on_ascend: Seen, page: trees.Page) -> None:
    values = EXPECTED_ON_ASCEND[page.observation]
    assert any(isinstance(value, Change) for value in values.values())
    assert observed_on_ascend["released"][page.observation] == expected(values, repaired=False)
    assert observed_on_ascend[page.name][page.observation] == expected(values, repaired=True)
    assert observed_on_ascend["all"][page.observation] == expected(values, repaired=True)


def test_each_diff_has_a_page_and_a_row_of_the_table() -> None:
    pages = trees.pages()
    assert sorted(page.diff for page in pages) == sorted(trees.PATCHES.glob("*/*.diff"))
    rows = {re.match(r"\[(.+)\]\(\1\.md\)", row[0])[1]: row for row in table_of("The diffs")}
    assert list(rows) == [page.name for package in ("vllm", "vllm-ascend") for page in trees.pages(package)]
    for page in pages:
        assert tuple(re.findall(r"^## (.+)$", page.body, re.M)) == SECTIONS, page.name
        parts = [f"`{name}`" for name in page.retires] + [f"part of `{name}`" for name in page.retires_part_of]
        assert rows[page.name][2] == (", ".join(parts) or "–"), page.name
        assert rows[page.name][3] == page.upstream, page.name


def test_each_workaround_is_retired_by_a_diff_or_explained() -> None:
    names = {patch.name for patch in WORKAROUNDS}
    retired = {name for page in trees.pages() for name in page.retires}
    in_part = {name for page in trees.pages() for name in page.retires_part_of}
    explained = {row[0].strip("`"): row[1] for row in table_of("Workarounds that no diff retires")}
    assert retired | in_part <= names
    assert set(explained) == names - retired
    assert all(len(reason) > 40 for reason in explained.values())


def test_the_diffs_are_in_the_style_of_the_releases() -> None:
    for page in trees.pages():
        limit = 80 if page.release.startswith("vllm ") else 120
        added = [line[1:] for line in page.diff.read_text().splitlines() if re.match(r"\+(?!\+\+)", line)]
        assert added
        assert [line for line in added if len(line) > limit or "npu_gptoss" in line or "npu-gptoss" in line] == []


@pytest.mark.serving
def test_a_diff_that_does_not_fit_is_refused(site: Path, tmp_path: Path) -> None:
    page = next(page for page in VLLM if page.observation == "tools_without_flags")
    (file,) = trees.changed_files(page.diff)
    trees.copy_for([page.diff], site, tmp_path / "copy")
    changed = tmp_path / "copy" / file
    text = changed.read_text()
    context = '== "gpt_oss"'
    assert context in page.diff.read_text()
    changed.write_text(text.replace(context, '== "gpt_other"'))
    assert trees.apply(page.diff, tmp_path / "copy").returncode != 0
    changed.write_text(text)
    assert trees.apply(page.diff, tmp_path / "copy").returncode == 0


@pytest.mark.serving
def test_the_installed_package_is_never_written_to(site: Path, copies: dict[str, Path]) -> None:
    for page in trees.pages("vllm"):
        for file in trees.changed_files(page.diff):
            copy = copies[page.name] / file
            assert not copy.is_symlink()
            assert not any(parent.is_symlink() for parent in copy.parents if parent.is_relative_to(copies[page.name]))
            assert copy.read_text() != (site / file).read_text()


def test_the_package_does_not_need_the_diffs() -> None:
    for source in (ROOT / "npu_gptoss").rglob("*.py"):
        strings = [node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant)]
        assert not [text for text in strings if isinstance(text, str) and re.search(r"\bpatches/vllm|\.diff\b", text)]
