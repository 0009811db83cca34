"""Run observations on several copies of a package, a forked process for each.

`python -m tests.patches.in_fork PACKAGE MODULE`, where MODULE has the observations. Standard input: JSON `[[folder or
null, [observation, …]], …]`; standard output: a JSON line for each, `{observation: value}`. The folder comes first on
sys.path, so that its package is the one that is imported. What all of them need is imported once, before the forks,
which is most of the time.
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

THIRD_PARTIES = (
    "torch._dynamo",
    "torch._inductor.standalone_compile",
    "transformers.modeling_utils",
    "transformers.models.auto",
    "openai",
    "fastapi",
    "openai_harmony",
    "xgrammar",
    "huggingface_hub",
    "scipy",
    "triton",
    "aiohttp",
    "torch_npu",
)


def observe(folder: str | None, names: list[str]) -> dict[str, object]:
    if folder is not None:
        sys.path.insert(0, folder)
    package, module = sys.argv[1:]
    observations = importlib.import_module(f"tests.patches.{module}").OBSERVATIONS
    imported = importlib.import_module(package)
    assert imported.__file__ is not None
    assert folder is None or Path(imported.__file__).is_relative_to(folder)
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = observations[name]()
        except Exception as error:
            traceback.print_exc()
            found[name] = f"the observation failed: {type(error).__name__}: {error}"
    return found


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
        if status:
            return dict.fromkeys(names, f"the process ended with status {status}")
        return json.load(answer)


if __name__ == "__main__":
    for name in THIRD_PARTIES:
        with contextlib.suppress(ImportError):  # it only saves time
            importlib.import_module(name)
    assert sys.argv[1] not in sys.modules
    for folder, names in json.load(sys.stdin):
        print(json.dumps(in_child(folder, names)), flush=True)
