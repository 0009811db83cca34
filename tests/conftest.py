"""One thread for all tests and for the processes that they start; and an emulated 910B that was promised must be there.

Waiting OpenMP threads spin: two processes with two threads each made the tests of the server twelve times slower on two
cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulator.tests.conftest import pytest_configure  # noqa: F401  an emulated 910B that was promised must be there
from npu_gptoss.serving.lines import here

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"  # CUDA's kernels on a CPU; before they are imported, which reads it once

AT_THE_START = dict(os.environ)
# what the line of NVIDIA's GPUs has not got: vLLM 0.33 lacks what these files import
if here().name == "0.33":
    names = "ascend", "attention_backend", "expert_weights", "model", "parity", "plugin"
    collect_ignore = ["verify/self_test", *(f"serving/test_{name}.py" for name in names)]
OF_OTHER_ENVIRONMENTS = {"emulated", "evalscope", "vllm033", "ascend_compiler"}


@pytest.fixture(scope="module", autouse=True)
def the_run_s_environment() -> Iterator[None]:
    """What the tests of a file leave in os.environ reaches no process that another file starts.

    vLLM's configuration sets variables for its workers, TORCHDYNAMO_DISABLE among them, with which a server of the next
    file would capture no graphs.
    """
    yield
    for name in set(os.environ) - set(AT_THE_START) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(AT_THE_START)


class AtOnce:
    """A failure is told as it happens: a run on somebody's GPU may be ended before pytest's own report."""

    def __init__(self, config: pytest.Config) -> None:
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.terminal is not None:
            self.terminal.write_line(f"\n{report.nodeid}: {str(report.longrepr)[-1500:]}")


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.option.markexpr == "cuda":
        session.config.pluginmanager.register(AtOnce(session.config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the longest files start first: those of the emulated 910B and of other environments."""
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        marks = [(item.path, {mark.name for mark in item.iter_markers()}) for item in items]
        long = {path for path, names in marks if "slow" in names and names & OF_OTHER_ENVIRONMENTS}
        items.sort(key=lambda item: ("serving" not in item.path.parts, item.path not in long))
