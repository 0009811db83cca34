"""The o200k vocabulary that openai-harmony wants, rebuilt offline and never trusted without its published SHA-256.

openai-harmony downloads `o200k_base.tiktoken` unless the environment variable TIKTOKEN_ENCODINGS_BASE names a folder
that holds it. Every gpt-oss checkpoint carries the same ranks in its `tokenizer.json`: a byte-level BPE vocabulary
whose ids 0..199997 are the ranks, and whose token strings spell bytes through GPT-2's byte-to-character table. So the
file can be rebuilt from the checkpoint alone, byte for byte. No network, no torch, no vLLM.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import logging
import os
from pathlib import Path

from npu_gptoss.errors import InputError
from npu_gptoss.files import cache_directory, is_there, mode_of, read_json, write_atomically

VOCABULARY_FILE = "o200k_base.tiktoken"
VOCABULARY_SIZE = 3_613_922  # bytes, as published
VOCABULARY_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
NUM_RANKS = 199_998  # ids below this are byte pairs; the special tokens of harmony follow

# As in the published tokenizer.json; the ids between are reserved
SPECIAL_IDS = {
    "startoftext": 199_998,
    "endoftext": 199_999,
    "return": 200_002,
    "constrain": 200_003,
    "channel": 200_005,
    "start": 200_006,
    "end": 200_007,
    "message": 200_008,
    "call": 200_012,
    "endofprompt": 200_018,
}
FIRST_SPECIAL_ID, LAST_SPECIAL_ID = 199_998, 200_018
# id -> text of all of them
SPECIAL_TOKENS = {i: f"<|reserved_{i}|>" for i in range(FIRST_SPECIAL_ID, LAST_SPECIAL_ID + 1)}
SPECIAL_TOKENS |= {i: f"<|{name}|>" for name, i in SPECIAL_IDS.items()}

BASE_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"  # read by openai-harmony

logger = logging.getLogger(__name__)


class VocabularyError(InputError):
    """A vocabulary that cannot be rebuilt, found, or that is not the published one."""


@functools.cache
def byte_characters() -> dict[int, str]:
    """GPT-2's table: each of the 256 bytes as one printable character; the unprintable ones move to U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


@functools.cache
def character_bytes() -> dict[str, int]:
    return {character: byte for byte, character in byte_characters().items()}


def is_published_vocabulary(path: Path) -> bool:
    """True when the file has the published size and SHA-256. Unreadable counts as no."""
    try:
        if path.stat().st_size != VOCABULARY_SIZE:
            return False
        return hashlib.sha256(path.read_bytes()).hexdigest() == VOCABULARY_SHA256
    except OSError:
        return False


def find_vocabulary(model_dir: Path | str | None = None) -> Path | None:
    """The first directory that holds the published vocabulary: $TIKTOKEN_ENCODINGS_BASE, the model's, our cache.

    A file of the right name with other content is not found, and a warning says so. None when there is none.
    """
    candidates: list[Path] = []
    if os.environ.get(BASE_VARIABLE):
        candidates.append(Path(os.environ[BASE_VARIABLE]))
    if model_dir is not None:
        candidates.append(Path(model_dir))
    candidates.append(cache_directory())
    for directory in candidates:
        path = directory / VOCABULARY_FILE
        if is_published_vocabulary(path):
            return directory
        if mode_of(path):
            logger.warning(
                "%s is not the published vocabulary (its SHA-256 is not %s) and is not used", path, VOCABULARY_SHA256
            )
    return None


def parse_ranks(content: bytes) -> list[bytes]:
    """The token bytes in rank order from the text of a .tiktoken file (`base64 rank` lines)."""
    return [base64.b64decode(line.split()[0]) for line in content.splitlines()]


def build_vocabulary(model_dir: Path | str, out_dir: Path | str | None = None) -> Path:
    """Rebuilds `o200k_base.tiktoken` from the checkpoint's `tokenizer.json`; returns the file's path.

    Written into `out_dir`; by default beside the checkpoint, or into the cache directory when that is not writable.
    Raises VocabularyError when the tokenizer is missing, broken, or not gpt-oss's; then nothing is written.
    """
    content = _ranks_of(Path(model_dir) / "tokenizer.json")
    digest = hashlib.sha256(content).hexdigest()
    if digest != VOCABULARY_SHA256:
        raise VocabularyError(
            f"{Path(model_dir) / 'tokenizer.json'} is not the tokenizer of gpt-oss: the vocabulary rebuilt from it has "
            f"SHA-256 {digest}, the published {VOCABULARY_FILE} has {VOCABULARY_SHA256}. Get tokenizer.json from the "
            "original checkpoint.",
            field="tokenizer.json",
        )
    if out_dir is not None:
        return _write_or_raise(Path(out_dir) / VOCABULARY_FILE, content)
    try:
        return write_atomically(Path(model_dir) / VOCABULARY_FILE, content)
    except OSError as error:
        logger.warning(
            "%s is not writable (%s): the vocabulary goes to %s", model_dir, error.strerror, cache_directory()
        )
        return _write_or_raise(cache_directory() / VOCABULARY_FILE, content)


def _write_or_raise(path: Path, content: bytes) -> Path:
    try:
        return write_atomically(path, content)
    except OSError as error:
        raise VocabularyError(
            f"the vocabulary cannot be written to {path.parent}: {error.strerror}. Name a writable folder with "
            "--output.",
            field="--output",
        ) from error


def _ranks_of(path: Path) -> bytes:
    """The text of a .tiktoken file from a tokenizer.json; nothing without a byte-level BPE vocabulary. Its digest tells
    if it is gpt-oss's."""
    if not is_there(path, VocabularyError):
        raise VocabularyError(
            f"{path}: expected a tokenizer, but there is none. The vocabulary is rebuilt from the checkpoint's own "
            "tokenizer.json: pass the directory of a checkpoint that has it.",
            field="tokenizer.json",
        )
    tokenizer = read_json(path, VocabularyError)
    try:
        ids = tokenizer["model"]["vocab"]
        names = sorted(ids, key=ids.__getitem__)[:NUM_RANKS]
        tokens = [bytes(map(character_bytes().__getitem__, name)) for name in names]
    except (KeyError, TypeError):
        return b""
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
