"""Runtime repairs of foreign code, and `apply()`, which installs them.

vLLM serves gpt-oss with defects that a plugin can repair only from outside. Each repair is a function marked
`@repair(name, targets, releases=…, until=…)`; its docstring says what goes wrong without it. `patches()` is the table
of all repairs. A repair is installed when the module that it changes is imported: `apply()` itself imports neither vLLM
nor torch, because it runs in every vLLM process, and most of these never serve HTTP. If the target is not the code that
the repair was written for, the repair is left out with one warning that names it.

`NPU_GPTOSS_SKIP_PATCHES=name,name` leaves repairs out; `status()` reports the state of each.
"""

from __future__ import annotations

import functools
import importlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from npu_gptoss import envs
from npu_gptoss.errors import InputError
from npu_gptoss.serving import logger
from npu_gptoss.serving.ascend.limits import installed, version_objection
from npu_gptoss.serving.compat.patch import Mismatch, Patch, all_or_nothing, repairs_of, when_imported
from npu_gptoss.serving.releases import installed_vllm, release_of

__all__ = ["Patch", "PatchError", "PatchStatus", "apply", "patches", "patches_here", "require_essential", "status"]


class PatchError(InputError):
    """A repair is missing without which gpt-oss would compute wrong results."""


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Returns the repairs of all releases, by folder and file. If two replace one name, the later calls the earlier."""
    root = Path(__file__).parent
    names = (".".join(path.relative_to(root).with_suffix("").parts) for path in sorted(root.glob("*/[!_]*.py")))
    return tuple(patch for name in names for patch in repairs_of(importlib.import_module(f"{__name__}.{name}")))


def patches_here() -> tuple[Patch, ...]:
    """Returns the repairs of the release in this process; all repairs if no release matches."""
    row = release_of(installed_vllm())
    return tuple(patch for patch in patches() if row is None or row.name in patch.releases)


@dataclass(frozen=True)
class PatchStatus:
    """State of a repair in this process."""

    patch: Patch
    state: Literal["applied", "waiting", "skipped"]  # waiting: its module is not imported in this process
    detail: str  # why skipped; empty otherwise


_lock = threading.Lock()
_status: dict[Patch, PatchStatus] = {}  # two releases may have a repair of one name, in two places


def _set(patch: Patch, state: Literal["applied", "waiting", "skipped"], detail: str = "") -> None:
    _status[patch] = PatchStatus(patch, state, detail)


def _install(patch: Patch, module: ModuleType) -> None:
    _set(patch, "applied")
    try:
        with all_or_nothing():
            if patch.module.startswith("vllm_ascend.") and (objection := version_objection(installed())):
                raise Mismatch(str(objection))
            patch.install(module)
    except Exception as error:  # the foreign code changed unexpectedly: never break its import
        detail = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        _set(patch, "skipped", detail)
        logger.warning("npu-gptoss leaves out its patch %s: %s. Without it: %s", patch.name, detail, patch.reason)


def apply() -> None:
    """Installs every repair, now or when its module is imported. A second call does nothing."""
    version = installed_vllm()
    row = release_of(version)
    skip = set(envs.get("NPU_GPTOSS_SKIP_PATCHES"))
    unknown = skip - {patch.name for patch in patches()}
    if unknown:
        raise InputError(
            f"NPU_GPTOSS_SKIP_PATCHES names {', '.join(sorted(unknown))}; the patches are "
            + ", ".join(dict.fromkeys(patch.name for patch in patches()))
        )
    outside = []
    for patch in patches_here():
        with _lock:
            if patch in _status:
                continue
            if patch.name in skip:
                _set(patch, "skipped", "NPU_GPTOSS_SKIP_PATCHES names it")
                continue
            if row is None:
                _set(patch, "skipped", f"vllm is {version}, the patch was written for {' and '.join(patch.releases)}")
                outside.append(patch.name)
                continue
            _set(patch, "waiting")
        when_imported(patch.module, lambda module, patch=patch: _install(patch, module))
    if outside:
        logger.warning("npu-gptoss leaves out its patches %s: they were not written for vllm %s", outside, version)


def status() -> tuple[PatchStatus, ...]:
    """Returns the state of each repair in the order of the table; a repair that `apply` has not seen is waiting."""
    return tuple(
        _status.get(patch, PatchStatus(patch, "waiting", "apply() was not called")) for patch in patches_here()
    )


def require_essential() -> None:
    """Raises PatchError if an essential repair is left out. The model's constructor calls this."""
    apply()
    missing = [entry for entry in status() if entry.patch.essential and entry.state == "skipped"]
    if missing:
        raise PatchError(
            "gpt-oss is not served without the patch "
            + "; ".join(f"{entry.patch.name} ({entry.detail}). {entry.patch.reason}" for entry in missing)
        )
