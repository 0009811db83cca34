"""A server of each release for all clients, in the environments that `make test-clients` sets up.

The tiny trained model answers: on the CPU with vLLM 0.11, on the emulated 910B with 0.23, and with 0.33 by a worker for
CPUs (tests/serving/on_cpu).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.places import set_up
from tests.endure.server import CPU_0_33, STACKS, Stack, start
from tests.serving.server import Server

SERVED = {"0.11": "cpu", "0.23": "emulated-9.1", "0.33": CPU_0_33}  # release -> stack
MARKS = {"0.23": pytest.mark.emulated, "0.33": pytest.mark.vllm033}
# ON: one of the stacks of `make endure` instead
ON = os.environ.get("ON")
assert not ON or ON in STACKS, f"ON={ON}: expected one of {', '.join(STACKS)}"
RELEASES = [ON] if ON else [pytest.param(release, marks=MARKS.get(release, ())) for release in SERVED]


@pytest.fixture(scope="session", params=RELEASES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from npu_gptoss.tiny.checkpoint import write_tiny

    folder: Path = tmp_path_factory.mktemp("clients")
    write_tiny(folder / "model", trained=True, mxfp4=True)
    model, log = folder / "model", folder / "server.log"
    if request.param in SERVED:
        set_up(request.param)
    with start(Stack(SERVED.get(request.param, request.param)), model, log) as (running, process):
        yield running
        assert process.poll() is None, f"the server died during the tests; its log is {running.log}"


@pytest.fixture(autouse=True)
def _release(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """For the table of docs/use-it-from.md (table.py)."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    release = params.get("server") or params.get("scripted")
    record_property("release", {stack: release for release, stack in SERVED.items()}.get(release, release))
