"""`python runner.py FILE`: runs each `case_…` of FILE in a forked process and prints a RESULT line of JSON for each.

A failed capture leaves torch_npu's allocator unusable, on the real device too, so each case has its process. torch_npu
is initialised once, before the first fork: it has no threads here.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch


def main(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.npu.synchronize()
    gc.collect()
    gc.freeze()  # torch.npu.graph collects garbage at every capture
    for name, function in list(vars(module).items()):
        if not name.startswith("case_"):
            continue
        with tempfile.TemporaryFile("w+") as report:
            child = os.fork()
            if child == 0:
                code = 0
                try:
                    function()
                except BaseException:
                    code = 1
                    traceback.print_exc(file=report)
                report.flush()
                os._exit(code)
            _, status = os.waitpid(child, 0)
            report.seek(0)
            text = report.read() if os.WIFEXITED(status) else f"killed by signal {os.WTERMSIG(status)}"
        print("RESULT " + json.dumps({"case": name, "ok": status == 0, "text": text}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
