"""One thread per process: waiting OpenMP threads spin, which made the server's tests twelve times slower on two cores.

A named emulated environment must exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emulator.tests.conftest import pytest_configure  # noqa: F401  a named environment must exist
from npu_gptoss.serving.releases import here

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"  # CUDA's kernels on a CPU; before they are imported, which reads it once

AT_THE_START = dict(os.environ)
# vLLM 0.33, the release for NVIDIA's GPUs, lacks imports of these files
if here().name == "0.33":
    names = "ascend", "attention_backend", "captured", "expert_weights", "model", "parity", "plugin"
    collect_ignore = ["verify/self_test", *(f"serving/test_{name}.py" for name in names)]
OF_OTHER_ENVIRONMENTS = {"emulated", "evalscope", "vllm033", "ascend_compiler"}


@pytest.fixture(scope="module", autouse=True)
def the_run_s_environment() -> Iterator[None]:
    """Restores os.environ after each file, so that no file's changes reach the processes of another.

    vLLM's configuration sets variables for its workers. With TORCHDYNAMO_DISABLE the next file's server would capture
    no graphs.
    """
    yield
    for name in set(os.environ) - set(AT_THE_START) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update(AT_THE_START)


class AtOnce:
    """Prints a failure at once: a run on a borrowed GPU may end before pytest's own report."""

    def __init__(self, config: pytest.Config) -> None:
        self.terminal = config.pluginmanager.get_plugin("terminalreporter")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.terminal is not None:
            self.terminal.write_line(f"\n{report.nodeid}: {str(report.longrepr)[-1500:]}")


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.option.markexpr == "cuda":
        session.config.pluginmanager.register(AtOnce(session.config))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU: make test-cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Starts the longest files first if there are several workers: the emulated 910B and other environments."""
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        marks = [(item.path, {mark.name for mark in item.iter_markers()}) for item in items]
        long = {path for path, names in marks if "slow" in names and names & OF_OTHER_ENVIRONMENTS}
        items.sort(key=lambda item: ("serving" not in item.path.parts, item.path not in long))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a worker whole files, and of the files that share a server all tests of a release: each starts it once.

    Those of the emulated 910B that fork their engines from the same two processes stay together, too.
    """
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = re.match(r"tests/serving/openai/.*\[(0\.\d+)[]-]", nodeid)
            if shared:
                return f"tests/serving/openai {shared[1]}"
            folder = "tests/serving/emulated"
            forked = re.match(rf"{folder}/test_(?!a3|launches|many_devices|packed|stock|wheel_schemas)", nodeid)
            return folder if forked else super()._split_scope(nodeid)

    return ByServer(config, log)
