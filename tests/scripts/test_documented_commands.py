"""Every command with a shell script that a page shows is taken by the script, as it stands there."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.markdown import ALL_COMMANDS, PAGES, name_of, spans
from tests.scripts.shell import beside_a_fake_evalscope, run
from tests.scripts.test_serve_sh import checkpoint

SCRIPTS = ("scripts/serve.sh", "scripts/perf.sh", "scripts/eval.sh", "scripts/mmlu.sh")
LAYERS = {"20b": 24, "120b": 36, "tiny": 4}
# lines of code blocks, and code of several words within sentences
CODE = {(command.page, command.text) for command in ALL_COMMANDS} | {
    (name_of(page), span) for page in PAGES for span in spans(page) if " " in span
}
SHOWN = sorted((page, line.partition(" #")[0]) for page, line in CODE if line.startswith(SCRIPTS))


def test_the_pages_show_commands() -> None:
    assert {line.split()[0] for _, line in SHOWN} == set(SCRIPTS), "the pattern is wrong, or a script is not documented"


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_the_script_takes_the_command(page: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    for index, word in enumerate(words):
        if word == "DIR" or word.startswith(("/models/", "/tmp/", ".checkpoints/", "path/to/")):
            # in their place something that is there
            if words[index - 1] == "--model":
                layers = LAYERS.get(Path(word).name.rpartition("-")[2], LAYERS["20b"])
                words[index] = str(checkpoint(tmp_path / Path(word).name, layers))
            else:
                (tmp_path / "README.md").touch()
                words[index] = str(tmp_path)
    if words[0] != "scripts/serve.sh":  # no server is asked
        words[1:1] = ["--model", "gpt-oss-20b", *(["--tokenizer", "/models/20b"] if "perf" in words[0] else [])]
    scripts = beside_a_fake_evalscope(tmp_path / "repository", status=1)
    done = run(Path(words[0]).name, "--dry-run", *words[1:], scripts=scripts)
    assert done.returncode == 0, f"{page}: {line}"
    assert done.stdout.strip()
