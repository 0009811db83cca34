"""docs/verify.md quotes the commands as they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gptoss.tiny.checkpoint import write_tiny
from tests.markdown import ROOT, blocks

PAGE = ROOT / "docs/verify.md"


@pytest.mark.slow
def test_replay_prints_the_lines_of_the_page(tmp_path: Path) -> None:
    """… stands for anything; the page leaves lines out."""
    text = PAGE.read_text()
    section = text[text.index("## Replay a call") : text.index("## Mistakes")]
    shell = next(block.text for block in blocks(PAGE) if block.language == "sh" and "NPU_GPTOSS_DUMP" in block.text)
    shown = next(block.text for block in blocks(PAGE) if block.language == "text" and block.text in section)
    write_tiny(tmp_path / ".checkpoints/gpt-oss-tiny", trained=True)
    bin_folder = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": bin_folder, "PYTHONPATH": str(ROOT), "NPU_GPTOSS_PLATFORM": "cpu"}
    command = ["bash", "-euo", "pipefail", "-c", shell.replace("/tmp/calls", str(tmp_path / "calls"))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in shown.splitlines():
        pattern = ".*?".join(re.escape(part) for part in line.split("…"))
        assert re.search(f"^{pattern}", done.stdout, re.M), f"{line!r} is not printed:\n{done.stdout}"
