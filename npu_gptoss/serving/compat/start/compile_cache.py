"""vLLM's cache of compiled graphs: what cannot be read is compiled again."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair

FILE = "vllm_compile_cache.py"
UNTIL = "vLLM compiles again what it cannot read"


@repair(
    "compile-cache", "vllm.compilation.backends:CompilerManager.initialize_cache .load", releases="0.23", until=UNTIL
)
def install(module: ModuleType) -> None:
    """A cut file in VLLM_CACHE_ROOT ends every later start.

    A full disk cuts one, or a kill: vLLM does not write them atomically.
    """
    manager = module.CompilerManager
    expect_source(manager.initialize_cache, f'os.path.join(cache_dir, "{FILE}")', "ast.literal_eval(f.read())")

    @around(manager, "initialize_cache")
    def initialize_cache(original: Original, self: Any, cache_dir: str, *more: Any, **named: Any) -> None:
        try:
            original(self, cache_dir, *more, **named)
        except Exception as error:
            file = Path(cache_dir, FILE)
            if file.exists():  # another server that starts now may have removed it
                logger.warning("%s cannot be read (%s): graphs are compiled again.", file, error)
                file.unlink(missing_ok=True)
            original(self, cache_dir, *more, **named)

    @around(manager, "load")
    def load(original: Original, self: Any, *args: Any, **named: Any) -> Any:
        try:
            return original(self, *args, **named)
        except Exception as error:
            logger.warning("A graph in %s cannot be read (%s): it is compiled again.", self.cache_dir, error)
            return None
