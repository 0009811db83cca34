"""Runs observations on several copies of vllm-ascend, a forked process for each: the imports are most of the time.

Standard input: JSON `[[folder or null, [observation, …]], …]`. Standard output: a JSON line for each, `{name: value}`.
The folder comes first on sys.path, so that its package is the one that is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

SHARED = ("torch._dynamo", "transformers.modeling_utils", "transformers.models.auto", "openai", "fastapi", "torch_npu")


def observe(folder: str | None, names: list[str]) -> dict[str, object]:
    if folder is not None:
        sys.path.insert(0, folder)
    imported = importlib.import_module("vllm_ascend")
    assert folder is None or Path(imported.__file__).is_relative_to(folder)
    observations = importlib.import_module("tests.patches.observations")
    return {name: getattr(observations, name)() for name in names}


def in_child(folder: str | None, names: list[str]) -> dict[str, object]:
    with tempfile.NamedTemporaryFile("r") as answer:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(2, 1)  # vLLM logs to standard output
                Path(answer.name).write_text(json.dumps(observe(folder, names)))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return json.load(answer) if status == 0 else {}


if __name__ == "__main__":
    for name in SHARED:
        with contextlib.suppress(ImportError):  # it only saves time
            importlib.import_module(name)
    for folder, names in json.load(sys.stdin):
        print(json.dumps(in_child(folder, names)), flush=True)
