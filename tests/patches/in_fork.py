"""Run observations on several copies of a package, a forked process for each.

`python -m tests.patches.in_fork`, standard input: JSON `[[folder or null, [observation, …]], …]`; standard output: a
JSON line for each, `{observation: value}`. The folder comes first on sys.path, so that its vllm is the one that is
imported. What vLLM needs is imported once, before the forks, which is most of the time.
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
)


def observe(folder: str | None, names: list[str]) -> dict[str, object]:
    if folder is not None:
        sys.path.insert(0, folder)
    import vllm

    from tests.patches.observations import OBSERVATIONS

    assert folder is None or Path(vllm.__file__).is_relative_to(folder)
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = OBSERVATIONS[name]()
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
    assert "vllm" not in sys.modules
    for folder, names in json.load(sys.stdin):
        print(json.dumps(in_child(folder, names)), flush=True)
