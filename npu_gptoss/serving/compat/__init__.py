"""Every runtime patch of foreign code, in one table, and `apply()`, which puts them in.

vLLM 0.11.0 serves gpt-oss with a number of defects that a plugin can only repair from outside. Each repair is one line
of `PATCHES`; the code lies in one file per idea. A patch is put in when the module that it changes is imported: this
package imports neither vLLM nor torch by itself, because `apply()` runs in every vLLM process, most of which never
serve HTTP. A patch whose target is not the code it was written for is left out with one warning that names it.

`NPU_GPTOSS_SKIP_PATCHES=name,name` leaves patches out, `status()` tells what happened to each.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from npu_gptoss import envs
from npu_gptoss.errors import InputError
from npu_gptoss.serving.compat.patch import Mismatch, Patch, when_imported

__all__ = ["PATCHES", "Patch", "PatchError", "PatchStatus", "apply", "require_essential", "status"]

logger = logging.getLogger(__name__)


class PatchError(InputError):
    """gpt-oss cannot be served rightly because a patch could not be put in."""


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="model-wide-window",
        reason="vLLM refuses any model with a sliding window on CPU, and gives a model whose layers all slide one window "
        "for every layer; gpt-oss's window is a matter of the layer, and its attention gets it from our model.",
        module="vllm.config.model",
        touches=("vllm.config.model:ModelConfig.get_sliding_window",),
        installer="window:install",
        upstream="none found",
        essential=True,
    ),
    Patch(
        name="cpu-native-ops",
        reason="A vLLM without compiled CPU operators, or with a torch newer than the one it was built for, calls operators "
        "that are not there, binds threads with them, and compiles with a dynamo that it does not know.",
        module="vllm.platforms.cpu",
        touches=("vllm.platforms.cpu:CpuPlatform.check_and_update_config",),
        installer="cpu:install_native_ops",
        upstream="none found",
    ),
    Patch(
        name="cpu-grammar-bitmask",
        reason="xgrammar's CPU kernel takes float32 logits only, so that the first structured output in bfloat16 ends the "
        "engine.",
        module="vllm.v1.structured_output.utils",
        touches=(
            "vllm.v1.structured_output.utils:apply_grammar_bitmask",
            "vllm.v1.worker.gpu_model_runner:apply_grammar_bitmask",
        ),
        installer="structured_output:install_bitmask",
        upstream="none found",
    ),
)


@dataclass(frozen=True)
class PatchStatus:
    """What became of a patch in this process."""

    patch: Patch
    state: Literal["applied", "waiting", "skipped"]  # waiting: its module is not imported in this process
    detail: str  # why skipped; empty otherwise


_lock = threading.Lock()
_status: dict[str, PatchStatus] = {}


def _vllm_release() -> tuple[str, str]:
    """The installed version of vLLM and the release that it is a build of ("" when it is none)."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "not installed", ""
    release = re.fullmatch(r"(\d+\.\d+\.\d+)(\.post\d+)?(\+.*)?", version)
    return version, release[1] if release else ""


def _set(patch: Patch, state: Literal["applied", "waiting", "skipped"], detail: str = "") -> None:
    _status[patch.name] = PatchStatus(patch, state, detail)


def _install(patch: Patch, module: ModuleType) -> None:
    with _lock:
        if _status[patch.name].state != "waiting":
            return
        _set(patch, "applied")
    try:
        patch.install(module)
    except Exception as error:  # foreign code has changed in a way nobody foresaw: never break its import
        detail = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        _set(patch, "skipped", detail)
        logger.warning("npu-gptoss leaves out its patch %s: %s. Without it: %s", patch.name, detail, patch.reason)


def apply() -> None:
    """Put every patch in, now or with the import of its module. Calling it again does nothing more."""
    version, release = _vllm_release()
    skip = set(envs.get("NPU_GPTOSS_SKIP_PATCHES"))
    unknown = skip - {patch.name for patch in PATCHES}
    if unknown:
        raise InputError(
            f"NPU_GPTOSS_SKIP_PATCHES names {', '.join(sorted(unknown))}; the patches are "
            + ", ".join(patch.name for patch in PATCHES)
        )
    outside = []
    for patch in PATCHES:
        with _lock:
            if patch.name in _status:
                continue
            if patch.name in skip:
                _set(patch, "skipped", "NPU_GPTOSS_SKIP_PATCHES names it")
                continue
            if release not in patch.vllm:
                _set(patch, "skipped", f"vllm is {version}, the patch was written for {' and '.join(patch.vllm)}")
                outside.append(patch.name)
                continue
            _set(patch, "waiting")
        when_imported(patch.module, lambda module, patch=patch: _install(patch, module))
    if outside:
        logger.warning(
            "npu-gptoss leaves out its patches %s: vllm is %s, they were written for 0.11.0", outside, version
        )


def status() -> tuple[PatchStatus, ...]:
    """What became of each patch, in the order of the table; a patch that `apply` has not seen is waiting."""
    return tuple(_status.get(patch.name, PatchStatus(patch, "waiting", "apply() was not called")) for patch in PATCHES)


def require_essential() -> None:
    """Raise PatchError when a patch is missing without which gpt-oss would be wrong in silence (at model construction)."""
    apply()
    missing = [entry for entry in status() if entry.patch.essential and entry.state == "skipped"]
    if missing:
        raise PatchError(
            "gpt-oss is not served without the patch "
            + "; ".join(f"{entry.patch.name} ({entry.detail}). {entry.patch.reason}" for entry in missing)
        )
