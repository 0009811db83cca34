"""Signatures of calls and of kernels: the dtype of each tensor role (query, kv, weight …).

A dtype is named as torch names it ("bfloat16"); packed formats without a torch dtype have other names
("mxfp4").
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_gptoss.errors import InputError

if TYPE_CHECKING:
    import torch


def dtype_name(dtype: object) -> str:
    """ "bfloat16" for torch.bfloat16 and for "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _is_size(want: int | str, size: int) -> bool:
    return want == size or isinstance(want, str)


def expect(name: str, tensor: torch.Tensor | None, *shape: int | str, dtype: torch.dtype | None = None) -> None:
    """Raises InputError for no tensor, and for one of another shape or dtype. shape: a word stands for any size."""
    if tensor is not None and (dtype is None or tensor.dtype == dtype):
        sizes = tensor.shape
        if sizes == shape or (len(sizes) == len(shape) and all(map(_is_size, shape, sizes))):
            return
    want = f"[{', '.join(map(str, shape))}]" + ("" if dtype is None else f" {dtype_name(dtype)}")
    got = "none" if tensor is None else f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"
    raise InputError(f"{name} must be {want}, got {got}", field=name)


@dataclass(frozen=True)
class Signature:
    """The dtypes of one call: (role, dtype name) pairs, sorted by role."""

    roles: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return ", ".join(f"{role} {dtype}" for role, dtype in self.roles)


@functools.lru_cache(maxsize=256)
def signature(**roles: object) -> Signature:
    return Signature(tuple(sorted((role, dtype_name(dtype)) for role, dtype in roles.items())))


@dataclass(frozen=True)
class Accepts:
    """One combination of dtypes that a kernel takes: role -> allowed names. needs: features of the platform for it."""

    roles: tuple[tuple[str, frozenset[str]], ...]
    needs: frozenset[str] = frozenset()

    def reasons_against(self, call: Signature) -> list[str]:
        passed = dict(call.roles)
        return [
            f"needs {' or '.join(sorted(allowed))} {role}, got {passed.get(role, 'none')}"
            for role, allowed in self.roles
            if passed.get(role) not in allowed
        ]


def accepts(needs: tuple[str, ...] = (), **roles: object | Iterable[object]) -> Accepts:
    """accepts(query="bfloat16", kv=("bfloat16", "float32")): one allowed dtype, or several.

    needs: features without which this combination is not there at all.
    """
    named = {
        role: frozenset(map(dtype_name, allowed))
        if isinstance(allowed, (tuple, list, set, frozenset))
        else frozenset({dtype_name(allowed)})
        for role, allowed in roles.items()
    }
    return Accepts(tuple(sorted(named.items())), frozenset(needs))
