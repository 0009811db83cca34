"""The engine's options on the command line, of `npu-gptoss generate` and of `npu-gptoss bench` alike."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from npu_gptoss.engine.decode import AUTO, MODES
from npu_gptoss.model import assembly
from npu_gptoss.model.sharding import EXPERT, TENSOR


def whole(text: str) -> int:
    """A whole number of at least 1; for argparse, which prints the sentence."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


NUMBER = {"type": whole, "metavar": "N"}
OPTIONS: dict[str, dict[str, Any]] = {
    "--device": {"default": "auto", "metavar": "auto|cpu|cuda|npu", "help": "where to compute"},
    "--dtype": {"default": "auto", "metavar": "auto|float32|bfloat16", "help": "of weights and activations"},
    "--max-batch-tokens": {"help": "most tokens of a step (default: 2048 on a CPU, else 16384)", **NUMBER},
    "--block-size": {"default": 16, "help": "tokens in one block of the cache", **NUMBER},
    "--num-blocks": {"help": "blocks of the cache (default: as many as fit)", **NUMBER},
    "--weights": {"choices": assembly.WEIGHTS, "default": assembly.AUTO, "help": "the experts' format on the device"},
    "--graphs": {"choices": (AUTO, *MODES), "default": AUTO, "help": "decode steps as graphs"},
    "--share-experts": {
        "choices": (TENSOR, EXPERT),
        "default": TENSOR,
        "help": "under torchrun: cut each expert, or deal them out whole",
    },
}


def add_options(
    parser: argparse.ArgumentParser, *names: str, options: Mapping[str, dict[str, Any]] = OPTIONS, **defaults: Any
) -> None:
    """Options by name. defaults: where this command has another one, by the name in the namespace."""
    for name in names:
        how = dict(options[name])
        if (key := name.lstrip("-")) in defaults:
            how["default"] = defaults[key]
        if how.get("default") is not None:
            how["help"] += " (default: %(default)s)"
        parser.add_argument(name, **how)
