"""One server for all clients, and the environments that they come in (`make test-clients` sets those up)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.server import Server, serve
from tests.soak.server import COMPACT


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder: Path = tmp_path_factory.mktemp("clients")
    write_tiny(folder / "model", trained=True, mxfp4=True)
    with serve(folder / "model", folder / "server.log", *COMPACT, "--max-num-seqs", "32") as running:
        yield running
