"""The server of each release of vLLM over the agents' script, and the requests that it answered."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.setup.environments import AGENTS
from tests.clients.agents.script import RULES
from tests.clients.places import TODAY, set_up, venv
from tests.serving.openai.conftest import RELEASES, Server, serve, tiny  # noqa: F401

CONTEXT = 131072  # the first prompts of agents have 4 000 to 17 000 tokens


class Asked:
    """The requests that a server has answered since this was made: method, route and status, from its log."""

    def __init__(self, log: Path) -> None:
        self.log, self._begin = log, log.stat().st_size

    def all(self) -> list[str]:
        new = self.log.read_bytes()[self._begin :].decode(errors="replace")
        return [" ".join(found) for found in re.findall(r'"([A-Z]+) (\S+?)(?:\?\S*)? HTTP/[\d.]+" (\d+)', new)]


@pytest.fixture(scope="session", params=RELEASES)
def scripted(
    request: pytest.FixtureRequest,
    tiny: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Server, Path]]:
    """A server and its log."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "rules.json").write_text(json.dumps(RULES))
    set_up(request.param)
    log = folder / f"{request.param}.log"
    flags = ("--rules", str(folder / "rules.json"), "--max-model-len", str(CONTEXT))
    with serve(request.param, tiny, log, *flags) as running:
        yield running, log


@pytest.fixture
def server(scripted: tuple[Server, Path]) -> Server:
    return scripted[0]


@pytest.fixture
def asked(scripted: tuple[Server, Path]) -> Asked:
    return Asked(scripted[1])


@pytest.fixture(scope="session")
def modules() -> Path:
    """Where npm has installed the agents."""
    folder = venv(TODAY) / AGENTS / "node_modules"
    if not folder.is_dir():
        if not shutil.which("npm"):
            pytest.skip("there is no npm here")
        pytest.fail(f"{folder.parent.name} is not set up; run: make test-clients")
    return folder
