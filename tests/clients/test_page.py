"""The Python of docs/use-it-from.md, as it stands there, against each release of vLLM."""

from __future__ import annotations

import subprocess

import pytest

from tests.clients.places import TODAY, venv
from tests.clients.table import PAGE
from tests.clients.test_clients import TRANSPORT
from tests.markdown import ROOT, code_blocks
from tests.serving.server import Server

pytestmark = [pytest.mark.clients, pytest.mark.slow]

BLOCKS = code_blocks(ROOT / PAGE, "py")
NAMES = ("openai", "anthropic", "openai-agents", "langchain", "pydantic-ai", "litellm", "instructor")


@pytest.mark.parametrize("block", BLOCKS, ids=NAMES)
def test_a_program_of_the_page_does_not_work(block: str, server: Server) -> None:
    code = block.replace("http://localhost:8000", server.url).replace("gpt-oss-20b", server.name)
    assert code.count(server.url) == block.count("localhost:8000") > 0
    quiet = TRANSPORT | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    command = [str(venv(TODAY) / "bin/python"), "-c", code]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
    if "3 + 4" in block:
        assert "3 + 4 = 7." in done.stdout
