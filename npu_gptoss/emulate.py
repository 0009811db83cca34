"""Runs any command on an emulated Ascend 910B: another name for `ascend-emulate`.

The emulator is a separate distribution (`emulator/` of the repository), which `make setup-emulated` installs.
"""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

from npu_gptoss.errors import InputError


def _command() -> ModuleType:
    try:
        return importlib.import_module("ascend_emulator.command")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ascend_emulator":
            raise
        raise InputError(
            "the emulated Ascend 910B is a separate distribution that is not installed here. In a clone of the "
            "repository: make setup-emulated; or pip install ./emulator"
        ) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _command().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    command = _command()
    try:
        return command.run(args)
    except command.EmulatorError as error:
        raise InputError(str(error)) from None
