"""Every command of every page works, or the page says what it needs.

Each line of shell is found (tests/docs/shell.py), read by the real parser (parsing.py), and either run here, run by a
test that the registry names, or marked for the reader (registry.py). Commands in sentences are read by the parser too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.parsing import objection
from tests.docs.registry import RULES, ByTest, Here, Needs, how, rule_for
from tests.docs.shell import NEEDS, Command, all_commands, blocks, commands, inline, split_comment, unmarked
from tests.evidence import objection as evidence_objection
from tests.markdown import PAGES, ROOT

COMMANDS = all_commands()


def alike(text: str) -> str:
    """The same for commands that differ in the place of the program or in the name of a new folder only."""
    return re.sub(r"(?<=\s)(?:/tmp/[\w-]+|DIR)\b", "PLACE", text.removeprefix(".venv/bin/"))


# one of those that are alike, as it stands; the one with the program's place if there is one
HERE = sorted({command.text for command in COMMANDS if isinstance(how(command.text), Here)}, reverse=True)
RUN_HERE = sorted({alike(text): text for text in HERE}.values())
QUICKSTART = ROOT / "docs/quickstart.md"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def unknown(found: list[Command]) -> list[str]:
    """Commands that nobody answers for, with what to do."""
    wrong = []
    for command in found:
        way = how(command.text)
        if way is None:
            wrong.append(
                f"{command.place}: `{command.text}` fits no rule of tests/docs/registry.py: add one that runs it, "
                "names the test that does, or says what it needs"
            )
        elif isinstance(way, Needs) and not command.needs.intersection(way.one_of):
            said = " or ".join(f"`# needs {name}`" for name in way.one_of)
            wrong.append(f"{command.place}: `{command.text}` is not marked: write {said} behind it or above it")
    return wrong


def test_every_command_is_run_or_tested_elsewhere_or_marked_for_the_reader() -> None:
    assert len(COMMANDS) > 80, "the pages lost their commands, or they are not found"
    assert unknown(COMMANDS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_stand_where_they_are_found(page: Path) -> None:
    assert [f"{page.name}:{line}: write it in a block of ```sh: {text}" for line, text in unmarked(text_of(page))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_real_parser_takes_every_command(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    fenced = [(command.line, command.text, False) for command in commands(text_of(page), name)]
    written = [(line, text, True) for line, text in inline(text_of(page))]
    wrong = [
        f"{name}:{line}: `{text}`: {reason}"
        for line, text, fragment in (*fenced, *written)
        if (reason := objection(text, fragment))
    ]
    assert wrong == []


def test_every_rule_is_used_and_its_tests_exist() -> None:
    used = {rule_for(command.text) for command in COMMANDS}
    assert [rule.pattern for rule in RULES if rule not in used] == [], "a rule for a command that no page has"
    named = {name for rule in RULES if isinstance(rule.how, ByTest) for name in rule.how.tests}
    assert {name: wrong for name in named - {".ci/run"} if (wrong := evidence_objection(name))} == {}
    assert all(set(rule.how.one_of) <= set(NEEDS) for rule in RULES if isinstance(rule.how, Needs))


def test_what_is_left_to_ci_is_what_ci_starts() -> None:
    """`make test` does the steps of each set-up, so whoever runs it has run them."""
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()

    def recipe(target: str) -> str:
        dry = ["make", "-n", target, "PYTHON=", "EMULATED=1", "EVALSCOPE=1", "DOCS=1"]
        return subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    started = recipe("test")
    for target in ("check", "setup", "setup-emulated", "setup-evalscope"):
        for line in recipe(target).splitlines():
            assert line in started, f"make {target} does what make test does not: {line}"
    assert "scripts/setup/setup_docs.py" in started


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder like that of the repository, in which commands may write: its parts, the environment, a checkpoint."""
    folder = tmp_path_factory.mktemp("tree")
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("outputs", "site", "build"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "tmp").mkdir()
    checkpoint = folder / ".checkpoints/gpt-oss-tiny"
    checkpoint.parent.mkdir()
    done = run(folder, "npu-gptoss tiny .checkpoints/gpt-oss-tiny --trained", 120)
    assert done.returncode == 0, done.stderr
    event = {"event": "op", "phase": "replay", "name": "npu::npu_fused_infer_attention_score_v2"}
    for place in ("trace.jsonl", "tmp/trace.jsonl"):
        (folder / place).write_text(json.dumps(event) + "\n")
    yield folder
    shutil.rmtree(folder / "tmp")  # several checkpoints of 120 MB
    shutil.rmtree(checkpoint)


def run(folder: Path, text: str, limit: int) -> subprocess.CompletedProcess[str]:
    """A line of a page in a shell. What it would write to /tmp goes to the folder, and DIR is a folder in it."""
    text = re.sub(r"(?<=[\s=])/tmp/", f"{folder}/tmp/", text)
    text = re.sub(r"(?<=\s)DIR\b", f"tmp/directory-{len(list((folder / 'tmp').iterdir()))}", text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_GPTOSS_")}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    command = ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit)


PRINTED: dict[str, str] = {}


@pytest.mark.slow
@pytest.mark.parametrize("text", RUN_HERE, ids=lambda text: text)
def test_a_command_runs_as_it_stands(text: str, tree: Path) -> None:
    done = run(tree, text, how(text).limit)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert done.stdout.strip() or done.stderr.strip(), "it said nothing"
    PRINTED[alike(text)] = done.stdout


@pytest.mark.slow
def test_the_quickstart_shows_what_its_commands_print(tree: Path) -> None:
    """Lines of its plain blocks; … stands for anything."""
    page = text_of(QUICKSTART)
    shown = [line for block in blocks(page) if block.language == "" for line in block.lines]
    assert len(shown) >= 5
    for command in commands(page, "docs/quickstart.md"):
        way, key = how(command.text), alike(command.text)
        if isinstance(way, Here) and key not in PRINTED:  # this test alone
            PRINTED[key] = run(tree, command.text, way.limit).stdout
    printed = " ".join("\n".join(PRINTED.values()).split())
    for line in shown:
        pattern = ".*?".join(re.escape(part) for part in " ".join(line.split()).split("…"))
        assert re.search(pattern, printed), f"no command of the page prints {line!r}"


# that the checks bite


PAGE = """Words.

```sh
npu-gptoss kernels list   # all of them
frobnicate --hard         # a made-up program
scripts/serve.sh --model /models/gpt-oss-20b
# needs a 910B
scripts/serve.sh --model /models/gpt-oss-120b \\
    --cards 8
```
"""


def test_a_command_that_nobody_answers_for_is_named_with_its_line() -> None:
    first, second = unknown(commands(PAGE, "docs/page.md"))
    assert first.startswith("docs/page.md:5: `frobnicate --hard` fits no rule")
    assert second.startswith("docs/page.md:6: `scripts/serve.sh --model /models/gpt-oss-20b` is not marked: write `#")


def test_commands_are_read_as_a_shell_reads_them() -> None:
    found = commands(PAGE, "docs/page.md")
    assert [command.line for command in found] == [4, 5, 6, 8]
    assert found[3].text == "scripts/serve.sh --model /models/gpt-oss-120b --cards 8"
    assert [sorted(command.needs) for command in found] == [[], [], [], ["a 910B"]]
    assert split_comment("""curl -d '{"a": "#1"}' x#y # why""") == ("""curl -d '{"a": "#1"}' x#y""", " why")


@pytest.mark.parametrize(
    ("above", "needed"),
    [
        ("It needs a 910B:", {"a 910B"}),
        ("Needs four\n910Bs.", {"a 910B"}),
        ("Needs an NVIDIA GPU.", {"an NVIDIA GPU"}),
        ("On a 910B:", set()),
        ("Needs a 910B.\n\nAnd then:", set()),
    ],
)
def test_a_mark_is_what_stands_right_above(above: str, needed: set[str]) -> None:
    (command,) = commands(f"{above}\n\n```sh\nmake tea\n```\n", "x.md")
    assert command.needs == needed


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("npu-gptoss kernels list --jason", "unrecognized arguments: --jason"),
        ("npu-gptoss sing", "no command 'sing'"),
        ("npu-gptoss bench sweat --model DIR", "invalid choice: 'sweat'"),
        ("npu-gptoss emulate -- npu-gptoss verify --mutilate", "unrecognized arguments: --mutilate"),
        ("npu-gptoss bench decode --modle DIR --batch …", "unrecognized arguments: --modle"),
        ("python scripts/tiny_mmlu.py DIR --questoins 4", "unrecognized arguments: --questoins"),
        ("python scripts/no_such.py", "there is no scripts/no_such.py"),
        ("python -c 'print(('", "does not read it"),
        ("make tea", "no target 'tea'"),
        ("make serve PROT=8001", "no variable 'PROT'"),
        ('make test PYTEST_ARGS="tests/nothing -x"', "there is no tests/nothing"),
        ("NPU_GPTOSS_PLATFROM=cpu npu-gptoss kernels list", "no variable NPU_GPTOSS_PLATFROM"),
        ("NPU_GPTOSS_KERNEL_MOE_ROUT=x npu-gptoss kernels list", "no variable NPU_GPTOSS_KERNEL_MOE_ROUT"),
        ("docker build -f docker/no.Dockerfile .", "there is no docker/no.Dockerfile"),
        ("docker compose -f docker/compose.yaml --profile 911b up", "no profile 911b"),
        ("docker/run-910b.sh --model /m --devcies 0", "no option --devcies"),
        ("torchrun --nproc-per-node 2 -m npu_gptoss.cli generate --model DIR --prompt x --tp 2", "arguments: --tp"),
        ("npu-gptoss kernels list && make tea", "no target 'tea'"),
        ("curl -s http://127.0.0.1:8000/v1 -d '{model: 1}'", "no JSON"),
        ("pip install -r requirements/nothing.txt", "there is no requirements/nothing.txt"),
        ("pip install 'npu-gptoss[tinny]'", "no extra 'tinny'"),
        ("frobnicate --now", "no program that"),
        ("make 'serve", "no shell reads it"),
    ],
)
def test_a_flag_or_a_name_that_is_made_up_is_told(text: str, wrong: str) -> None:
    assert wrong in (objection(text) or "nothing is wrong")


def test_a_fragment_may_leave_out_what_is_required_and_nothing_else() -> None:
    assert objection("npu-gptoss bench decode") is not None
    assert objection("npu-gptoss bench decode", fragment=True) is None
    assert "--bach" in objection("npu-gptoss bench decode --bach 8", fragment=True)


@pytest.mark.parametrize("text", ["```\nmake serve\n```\n", "```bash\nls\n```\n", "Do:\n\n    npu-gptoss doctor\n"])
def test_a_command_outside_of_a_block_of_shell_is_found(text: str) -> None:
    assert unmarked(text)


@pytest.mark.parametrize("text", ["```text\nmake serve\n```\n", "```sh\nmake serve\n```\n", "A sentence: make serve\n"])
def test_output_and_sentences_are_no_commands(text: str) -> None:
    assert unmarked(text) == []
