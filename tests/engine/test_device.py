"""Names of devices and dtypes that cannot be used are refused in words, not by a traceback from inside torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.engine.device import kernels_for, resolve_device, resolve_dtype
from npu_gptoss.kernels import current_platform, platform_override
from tests.checkpoints import random_config
from tests.refused import refused


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "meta", "mps", "cpu gpu"])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with refused("device"):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_a_device_that_is_not_here_is_refused() -> None:
    with refused("device"):
        resolve_device("cuda")


def test_a_number_beyond_the_devices_that_torch_sees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda asked: two)
    assert [resolve_device(name).index for name in ("cuda", "cuda:0", "cuda:1")] == [None, 0, 1]
    with refused("device"):
        resolve_device("cuda:2")


def test_npu_without_torch_npu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with refused("device"):
        resolve_device("npu")


def test_auto_falls_back_to_the_cpu_where_torch_cannot_use_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU server with a CPU build of torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with platform_override("cuda"):
        assert resolve_device("auto") == torch.device("cpu")
    assert resolve_device("cpu") == torch.device("cpu")


def test_kernels_are_selected_for_the_device_in_use() -> None:
    with platform_override("cuda"):
        with kernels_for(torch.device("cpu")):
            assert current_platform().kind == "cpu"
        with kernels_for(torch.device("cuda")):
            assert current_platform().kind == "cuda"
        assert current_platform().kind == "cuda"


def test_dtypes_follow_the_name_or_the_checkpoint() -> None:
    assert resolve_dtype("auto", random_config(dtype="float32")) == torch.float32
    assert resolve_dtype("auto", random_config(dtype=None)) == torch.bfloat16
    assert resolve_dtype("float32", random_config()) == torch.float32
    assert resolve_dtype(torch.bfloat16, random_config(dtype="float32")) == torch.bfloat16


@pytest.mark.parametrize("name", ["float16", torch.float16, "int8", "half"])
def test_other_dtypes_are_refused(name: str | torch.dtype) -> None:
    with refused("dtype"):
        resolve_dtype(name, random_config())
