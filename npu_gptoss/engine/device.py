"""Turns the names of `--device` and `--dtype` into torch's, or refuses them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import current_platform, platform_override
from npu_gptoss.kernels.platform import DEVICE_TYPES
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.transformer import check_dtype

AUTO = "auto"
SMALL = 512  # hidden size; gpt-oss has 2880
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str | torch.device) -> torch.device:
    """`auto` is the platform's device if torch can use it, else the CPU; `cuda:1` names one of several."""
    if name == AUTO:
        wanted = current_platform().device_type
        return torch.device(wanted if _why_unusable(wanted) is None else "cpu")
    name = str(name)
    device_type, colon, index = name.partition(":")
    if device_type not in DEVICE_TYPES.values() or (colon and not index.isdecimal()):
        raise InputError(
            f"there is no device {name!r}: expected auto, {', '.join(sorted(DEVICE_TYPES.values()))}", field="device"
        )
    reason = _why_unusable(device_type)
    if reason:
        raise InputError(f"the device {name!r} cannot be used here: {reason}", field="device")
    device = torch.device(name)  # only now: torch does not know the word npu before torch_npu is imported
    if device.type != "cpu" and (device.index or 0) >= (count := torch.get_device_module(device.type).device_count()):
        raise InputError(
            f"there is no device {name!r}: torch sees {count} of that type, numbered from 0", field="device"
        )
    return device


def _why_unusable(device_type: str) -> str | None:
    if device_type == "cpu":
        return None
    if device_type == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            return f"torch_npu cannot be imported ({error})"
    if not torch.get_device_module(device_type).is_available():
        return f"torch {torch.__version__} finds no such hardware or was built without it"
    return None


def resolve_dtype(name: str | torch.dtype, config: GptOssConfig) -> torch.dtype:
    """`auto` is the checkpoint's dtype, bfloat16 when it has none."""
    if isinstance(name, str):
        if name == AUTO:
            name = config.dtype or "bfloat16"
        if name not in _DTYPES:
            raise InputError(
                f"there is no dtype {name!r} for gpt-oss: expected auto, float32 or bfloat16", field="dtype"
            )
        name = _DTYPES[name]
    check_dtype(name)
    return name


def limit_threads(config: GptOssConfig, device: torch.device) -> None:
    """One thread for a small model on a CPU, unless OMP_NUM_THREADS is set.

    Such a model gains nothing from a second thread, and OpenMP threads that wait spin: beside other work a step takes
    ten times as long.
    """
    if device.type == "cpu" and config.hidden_size < SMALL and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sets one thread inside torch, for work on small tensors: on a busy machine several threads wait for each other,
    spinning, in each operation, and a minute's work of one took two ten minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def kernels_for(device: torch.device) -> Iterator[None]:
    """Selects kernels for the device in use: on a GPU server, `--device cpu` must not get the GPU's kernels."""
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # from here on its architecture is known, and with it which kernels it has
    if current_platform().device_type == device.type:
        yield
        return
    kind = next(kind for kind, device_type in DEVICE_TYPES.items() if device_type == device.type)
    with platform_override(kind):
        yield
