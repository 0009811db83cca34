"""Every command of every page is taken by its program; what needs only this repository runs as it stands."""

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

from tests.docs.dry import objection
from tests.markdown import ALL_COMMANDS, PAGES, ROOT, Block, blocks, commands, name_of

QUICKSTART = ROOT / "docs/quickstart.md"
# what runs here as it stands, in a copy of the tree with the tiny checkpoint, one command of each kind; the rest has
# tests of its own, or needs what the page says beside it
RUN = re.compile(
    r"(?:\w+=\S+ )?(?:\.venv/bin/)?(?P<kind>"
    r"npu-gptoss (?:kernels (?:list|explain)|tiny |vocabulary |verify(?= attention\.paged$|$)"
    r"|(?:doctor|generate)(?= --model \.checkpoints/gpt-oss-tiny)|bench (?:compare|table)(?= docs/benchmarks/))"
    r"|python scripts/tiny_mmlu\.py |python3 -c(?= .*trace\.jsonl))"
)


HERE = {
    found["kind"]: command.text
    for command in sorted(ALL_COMMANDS, key=lambda command: command.page == name_of(QUICKSTART))  # its own are kept
    if (found := RUN.match(command.text)) and command.page != "docs/add-a-kernel.md"
}
HERE["npu-gptoss verify"] = "npu-gptoss verify moe.route"  # all kernels take a minute: tests/verify


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_programs_own_parser_takes_every_command(page: Path) -> None:
    read = [(command, objection(command.text)) for command in commands(page) if "…" not in command.text]
    assert [f"{command.place}: `{command.text}`: {wrong}" for command, wrong in read if wrong] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("npu-gptoss kernels list --jason", "--jason"),
        ("npu-gptoss sing", "sing"),
        ("npu-gptoss bench sweat --model DIR", "sweat"),
        ("npu-gptoss emulate -- npu-gptoss verify --mutilate", "--mutilate"),
        ("X=1 npu-gptoss kernels list | npu-gptoss kernels lost  # both", "lost"),
        ("python scripts/tiny_mmlu.py DIR --questoins 4", "--questoins"),
        ("python scripts/no_such.py", "scripts/no_such.py"),
        ("torchrun --nproc-per-node 2 -m npu_gptoss.cli generate --model DIR --prompt x --pt 2", "--pt"),
        ("make tea", "tea"),
        ("make serve PROT=8001", "PROT"),
        ('make test PYTEST_ARGS="tests/nothing -x"', "tests/nothing"),
        ("scripts/no_such.sh --model DIR", "no_such.sh"),
        ("make 'serve", "no shell reads it"),
    ],
)
def test_a_name_that_is_made_up_is_found(text: str, wrong: str) -> None:
    assert wrong in (objection(text) or "nothing is wrong")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder like that of the repository, in which commands may write: its parts, the environment, a checkpoint."""
    folder = tmp_path_factory.mktemp("tree")
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("outputs", "site", "build"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("tmp", ".checkpoints"):
        (folder / name).mkdir()
    run(folder, "npu-gptoss tiny .checkpoints/gpt-oss-tiny --trained")
    event = {"event": "op", "phase": "replay", "name": "npu::npu_fused_infer_attention_score_v2"}
    for place in ("trace.jsonl", "tmp/trace.jsonl"):
        (folder / place).write_text(json.dumps(event) + "\n")
    yield folder
    for name in ("tmp", ".checkpoints"):
        shutil.rmtree(folder / name)  # several checkpoints of 120 MB


def run(folder: Path, text: str) -> str:
    """What a line of a page prints. What it would write to /tmp goes to the folder, and DIR is a folder in it."""
    text = re.sub(r"(?<=[\s=])/tmp/", f"{folder}/tmp/", text)
    text = re.sub(r"(?<=\s)DIR\b", f"tmp/directory-{len(list((folder / 'tmp').iterdir()))}", text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_GPTOSS_")}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment["PATH"]))
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Command -> what it printed."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(HERE))
def test_a_command_runs_as_it_stands(kind: str, tree: Path, printed: dict[str, str]) -> None:
    printed[kind] = run(tree, HERE[kind])


@pytest.mark.slow
def test_the_quickstart_shows_what_its_commands_print(tree: Path, printed: dict[str, str]) -> None:
    """Lines of its plain blocks; … stands for anything."""
    shown = [line for block in blocks(QUICKSTART) if block.language == "" for line in block.text.splitlines()]
    assert len(shown) >= 5
    kinds = {found["kind"] for command in commands(QUICKSTART) if (found := RUN.match(command.text))}
    for kind in kinds - set(printed):  # this test alone
        printed[kind] = run(tree, HERE[kind])
    everything = " ".join("\n".join(printed.values()).split())
    for line in shown:
        pattern = ".*?".join(re.escape(part) for part in " ".join(line.split()).split("…"))
        assert re.search(pattern, everything), f"no command of the page prints {line!r}"


OWN_TEST = ("CONTRIBUTING.md", "docs/add-a-kernel.md", "docs/serving-on-cpu.md")  # their Python has tests elsewhere
BLOCKS = [(page, block) for page in PAGES for block in blocks(page) if block.language in ("python", "json")]


@pytest.mark.parametrize(("page", "block"), [pytest.param(p, b, id=f"{name_of(p)}:{b.line}") for p, b in BLOCKS])
def test_blocks_of_python_run_and_blocks_of_json_are_json(page: Path, block: Block) -> None:
    if block.language == "json":
        assert json.loads(block.text)
    elif name_of(page) in OWN_TEST or name_of(page).startswith("emulator/"):
        compile(block.text, str(page), "exec")
    else:
        subprocess.run([sys.executable, "-c", block.text], cwd=ROOT, check=True)
