"""Rebuild `o200k_base.tiktoken`, which openai-harmony needs, from a checkpoint's own tokenizer.json: no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_SHA256, build_vocabulary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_dir", type=Path, metavar="MODEL_DIR", help="directory of a gpt-oss checkpoint (tokenizer.json)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="where to write (default: MODEL_DIR, or $XDG_CACHE_HOME/npu_gptoss when that is not writable)",
    )


def run(args: argparse.Namespace) -> int:
    path = build_vocabulary(args.model_dir, args.output)
    print(f"{path} (SHA-256 {VOCABULARY_SHA256}, as published)")
    print(f"openai-harmony uses it offline with {BASE_VARIABLE}={path.parent}")
    return 0
