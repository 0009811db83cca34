from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_gptoss.kernels import loading
from npu_gptoss.kernels.registry import Operation, define_operation, registry


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes a test's operations and kernels after it; keeps third-party kernels out."""
    monkeypatch.setattr(loading, "_plugins_loaded", True)
    loading.load_kernels()  # first, or the built-in kernels would be gone with this test's copies
    monkeypatch.setattr(registry, "operations", dict(registry.operations))
    monkeypatch.setattr(registry, "kernels", dict(registry.kernels))
    registry.generation += 1
    yield
    registry.generation += 1


@pytest.fixture
def operation() -> Operation:
    return define_operation("toy", "add", roles=("x",), traits=("size",), sizes=("rows",), summary="adds one")
