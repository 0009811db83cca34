"""Writes the harmony vocabulary into a folder, from the package bpe-openai; checks it against its published SHA-256."""

from __future__ import annotations

import sys
from pathlib import Path

from npu_gptoss.harmony.vocabulary import VOCABULARY_FILE, is_published_vocabulary
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / VOCABULARY_FILE
    path.write_bytes(packaged_vocabulary())
    if not is_published_vocabulary(path):
        print(f"{path} is not the published vocabulary; is bpe-openai 0.1.4 installed?", file=sys.stderr)
        path.unlink()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
