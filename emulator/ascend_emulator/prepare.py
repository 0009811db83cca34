"""Completes an environment after `pip install`: libraries that wheels lack, and the .pth file that boots the device.

`ascend-emulate` does it before its first command, and again for another torch, torch-npu or vllm-ascend;
`python -m ascend_emulator.prepare` does it at once, for the environment of that Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import sys
from importlib import metadata
from pathlib import Path

from ascend_emulator import stubs
from ascend_emulator.errors import EmulatorError
from ascend_emulator.launch import FOLDER
from ascend_emulator.settings import PREFIX

WHEELS = ("torch", "torch-npu", "vllm-ascend")
MADE_FOR = "made-for.json"
PTH = "ascend_emulator.pth"
HOOK = f'import os; os.environ.get("{PREFIX}") and __import__("ascend_emulator.boot", fromlist=["hook"]).hook()\n'


def installed(site_packages: Path) -> dict[str, str]:
    """Versions of the wheels whose libraries are read."""
    named = ((re.sub("[-_.]+", "-", d.name).lower(), d) for d in metadata.distributions(path=[str(site_packages)]))
    return {name: distribution.version for name, distribution in named if name in WHEELS}


def prepare(venv: Path, *, anew: bool = False) -> None:
    """Brings the environment up to date. Raises EmulatorError if torch_npu or the compiler is missing."""
    for site_packages in venv.glob("lib/python3.*/site-packages"):
        if (site_packages / "torch_npu").is_dir():
            break
    else:
        raise EmulatorError(f"{venv} has no torch_npu. Install torch and torch-npu there first.")
    libraries = venv / FOLDER / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    made_for, wanted = libraries / MADE_FOR, installed(site_packages)
    with (libraries.parent / "lock").open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # servers and tests start side by side
        if not anew and made_for.is_file() and json.loads(made_for.read_text()) == wanted:
            return
        said = ", ".join(f"{name} {version}" for name, version in sorted(wanted.items()))
        print(f"ascend-emulate: making the emulated CANN for {said}, once; it takes a minute", file=sys.stderr)
        made_for.unlink(missing_ok=True)
        for name, counts in stubs.generate(site_packages, libraries).items():
            print(f"{name:<28} {counts['emulated']:>4} emulated  {counts['failing']:>4} fail with their name")
        (site_packages / PTH).write_text(HOOK)
        made_for.write_text(json.dumps(wanted))


def main() -> int:
    try:
        prepare(Path(sys.prefix), anew=True)
    except (EmulatorError, ValueError) as error:
        print(f"ascend-emulate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
