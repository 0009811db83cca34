"""`patched(*names)`: foreign code as vLLM ships it, plus exactly the named repairs, restored afterwards."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from npu_gptoss.serving import compat
from npu_gptoss.serving.compat.patch import stock
from tests.serving.compat import of_release

collect_ignore = [
    file.name
    for file in Path(__file__).parent.glob("test_*.py")
    if of_release.HERE is not None and file.name not in of_release.HERE
]

# Repairs whose foreign package is installed: vllm-ascend's are tested on the emulated 910B.
HERE = [patch for patch in compat.patches_here() if importlib.util.find_spec(patch.module.partition(".")[0])]


# vllm-ascend 0.23's modules import each other in a circle, unless this module comes first, as in vLLM.
with contextlib.suppress(ImportError):
    importlib.import_module("vllm_ascend.worker.worker")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.serving)


def owner_of(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if isinstance(owner, type):  # the class that defines it: vllm-ascend replaces vLLM's scheduler by a subclass
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    return owner, name


@contextlib.contextmanager
def _patched(*names: str) -> Iterator[None]:
    compat.apply()  # before a plugin that vLLM loads inside the block
    targets = [owner_of(target) for patch in HERE for target in patch.touches]
    before = [(owner, name, vars(owner)[name]) for owner, name in targets]
    for owner, name, value in before:
        setattr(owner, name, stock(value))
    try:
        for patch in HERE:
            if patch.name in names:
                patch.install(importlib.import_module(patch.module))
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@pytest.fixture
def patched() -> Callable[..., contextlib.AbstractContextManager[None]]:
    known = {patch.name for patch in HERE}

    def checked(*names: str) -> contextlib.AbstractContextManager[None]:
        assert set(names) <= known
        return _patched(*names)

    return checked


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """See `in_process.py`. No check in front of the core refuses a request."""
    from tests.serving.compat import in_process
    from tests.serving.conftest import ENVIRONMENT

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name in ("_validate_params", "_validate_model_inputs"):
            patch.setattr(of_release.input_processor(), name, lambda self, *_: None)
        yield in_process.start(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with the engine, the engine holds no request and no block."""
    yield
    if "engine" in request.fixturenames:
        from tests.serving.compat.in_process import core_of

        scheduler = core_of(request.getfixturevalue("engine")).scheduler
        assert (scheduler.requests, scheduler.get_request_counts(), scheduler.kv_cache_manager.usage) == ({}, (0, 0), 0)
