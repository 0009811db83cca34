"""Brings kernels into the registry: ours by module name, other packages' by the entry-point group `npu_gptoss.kernels`.

An entry point names a module (its import registers) or a function without arguments (its call registers).
"""

from __future__ import annotations

import importlib
import logging
import threading
from importlib.metadata import entry_points

from npu_gptoss import envs
from npu_gptoss.kernels import dumping
from npu_gptoss.kernels.registry import registering_as, registry

ENTRY_POINT_GROUP = "npu_gptoss.kernels"

# By name, because the spine imports nothing above itself.
FAMILIES = ("npu_gptoss.attention", "npu_gptoss.moe", "npu_gptoss.dense", "npu_gptoss.graphs.advance")

logger = logging.getLogger(__name__)
_plugins_lock = threading.Lock()
_plugins_loaded = False


def load_kernels() -> None:
    """Registers all kernels; every later call does nothing."""
    for family in FAMILIES:
        importlib.import_module(family)
    load_plugins()


def load_plugins() -> None:
    """Loads third-party kernels once. A failing one is a warning that names it, and none of its kernels stays."""
    global _plugins_loaded
    with _plugins_lock:
        if _plugins_loaded:
            return
        _plugins_loaded = True
        dumping.install()
        if envs.get("NPU_GPTOSS_DISABLE_PLUGINS"):
            logger.info("third-party kernels are off (NPU_GPTOSS_DISABLE_PLUGINS)")
            return
        for entry_point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
            load_plugin(entry_point)


def load_plugin(entry_point: object) -> None:
    """One entry point (anything with `name`, `value`, `dist` and `load`)."""
    origin = f"{entry_point.dist.name if entry_point.dist else 'unknown package'}:{entry_point.name}"
    try:
        with registering_as(origin):
            loaded = entry_point.load()
            if callable(loaded):
                loaded()
    except Exception as error:
        registry.remove_origin(origin)
        why = f"{entry_point.value}: {type(error).__name__}: {error}"
        remedy = "Repair or uninstall it, or set NPU_GPTOSS_DISABLE_PLUGINS=1."
        logger.warning("the kernels of plugin %s are not available: %s. %s", origin, why, remedy)
