"""One server for all clients, and the environments that they come in (`make test-clients` sets those up)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.server import Server
from tests.soak.server import Stack, start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """ON: one of the soak's stacks, such as emulated-9.1; a CPU's without it."""
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder: Path = tmp_path_factory.mktemp("clients")
    write_tiny(folder / "model", trained=True, mxfp4=True)
    with start(Stack(os.environ.get("ON") or "cpu"), folder / "model", folder / "server.log") as (running, process):
        yield running
        assert process.poll() is None, f"the server died during the tests; its log is {running.log}"
