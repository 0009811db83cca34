"""`npu-gptoss …`: a table of commands. Each command lives in the module named here, imported when asked for."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from npu_gptoss import __version__, envs
from npu_gptoss.errors import InputError

COMMANDS: dict[str, tuple[str, str]] = {
    "convert": ("npu_gptoss.convert.command", "convert checkpoints of other tools, MXFP4 and BF16, and merge adapters"),
    "doctor": ("npu_gptoss.doctor.command", "check this machine for gpt-oss, with a remedy for each problem"),
    "bench": ("npu_gptoss.bench.command", "measure decode, prefill, kernels beside the floor; compare"),
    "emulate": ("npu_gptoss.emulate", "run any command on an emulated Ascend 910B, without an NPU"),
    "generate": ("npu_gptoss.engine.command", "generate text with the offline engine"),
    "kernels": ("npu_gptoss.kernels.command", "list the registered kernels, or explain which one is selected and why"),
    "tiny": ("npu_gptoss.tiny.command", "write a tiny checkpoint in the official layout, random or trained"),
    "tune": ("npu_gptoss.bench.tune", "measure the kernels' tiles on this NVIDIA GPU, and write them as a table"),
    "verify": ("npu_gptoss.verify.command", "check every kernel that can run here against the definition"),
    "vocabulary": ("npu_gptoss.harmony.vocabulary_command", "rebuild harmony's vocabulary from a checkpoint, offline"),
}


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    head, end = "usage: npu-gptoss COMMAND [options]\n\ncommands:", "\n`npu-gptoss COMMAND --help` tells more."
    return "\n".join([head, *lines, end])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0 success, 1 a negative result, 2 input that cannot be used."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        if sys.stdout:  # None where it is closed (`>&-`)
            sys.stdout.flush()
    except RuntimeError as error:
        if "backend extension" not in str(error):  # of torch, which loads torch_npu at import
            raise
        print(
            f"npu-gptoss {arguments[0]}: torch_npu does not load ({error.__cause__ or error}). It needs CANN and the "
            "driver of a 910B, which docker/run-910b.sh mounts; TORCH_DEVICE_BACKEND_AUTOLOAD=0 leaves torch_npu out.",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        if error.errno == errno.EPIPE:  # `npu-gptoss kernels list | head`
            return 0
        print("npu-gptoss: nothing more can be written: the disk is full. Make room.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("npu-gptoss: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"npu-gptoss {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"npu-gptoss: there is no command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(COMMANDS[name][0])
    except ModuleNotFoundError as error:
        if error.name != "openai_harmony":
            raise
        remedy = "A vLLM brings it; without one: pip install oss-harmony"
        print(f"npu-gptoss {name}: openai-harmony is not installed, which chats need. {remedy}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog=f"npu-gptoss {name}", description=module.__doc__)
    if name != "doctor":  # doctor has its own check
        for sentence in envs.unknown(os.environ):
            print(f"npu-gptoss: {sentence}", file=sys.stderr)
    try:
        module.add_arguments(parser)
        return module.run(parser.parse_args(rest))
    except InputError as error:
        print(f"npu-gptoss {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
