"""Loads tokenizer.json with the library `tokenizers`, and turns its failures into errors.

Training saves its last call's padding and truncation into the file. transformers resets both at each call; so does
this loader, or each text of a chat would be padded to the longest, or cut.

The library raises bare `Exception` for most bad files. A panic of its Rust code raises a `BaseException`, which
`except Exception` misses, after cryptic lines on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from npu_gptoss.errors import InputError, short
from npu_gptoss.files import MOST_BYTES, is_there, read_bytes, read_json, refuse_pointer

FILE_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
_AGAIN = "Get it from the original checkpoint."
# Long runs: a pattern that tries every split of them panics
_SAMPLE = "What is 3 + 4?\n\tNaïve café, 你好 <|start|>" + "".join(64 * c + "!" for c in "aA1 \n-")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file, tested on a short text in both directions. Raises InputError."""
    if not is_there(path, InputError):
        raise InputError(f"{path}: expected a tokenizer, but there is none. {_AGAIN}", field=FILE_NAME)
    if path.stat().st_size > MOST_BYTES[FILE_NAME]:
        most = MOST_BYTES[FILE_NAME] >> 20
        raise InputError(f"{path}: expected at most {most} MiB, got more. {_AGAIN}", field=FILE_NAME)
    with panics_told(f"{path} cannot be read as a tokenizer"):
        refuse_pointer(path, InputError)
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with panics_told(f"{path} is a tokenizer that cannot turn a text into tokens and back"):
        tokenizer.decode(tokenizer.encode(_SAMPLE, add_special_tokens=False).ids)
    return tokenizer


def check_vocabulary(path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises InputError if the tokenizer has ids without a row in the model."""
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocab_size:
        wrong = f"expected ids below vocab_size of config.json ({vocab_size}), got {largest}"
        raise InputError(f"{path}: {wrong}. Take the tokenizer of these weights.", field=FILE_NAME)


def chat_template(directory: Path) -> tuple[str, str]:
    """The Jinja template beside the weights, and its place: a file or a field; empty without one."""
    path, config = directory / TEMPLATE_NAME, directory / "tokenizer_config.json"
    if is_there(path, InputError):
        return read_bytes(path, InputError).decode(errors="replace"), TEMPLATE_NAME
    values = read_json(config, InputError) if is_there(config, InputError) else None
    found = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(found, list):  # several by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else "", "chat_template of tokenizer_config.json"


def check_template(directory: Path) -> None:
    """Raises InputError for the template of another format: chats are written and read in harmony, without it."""
    text, place = chat_template(directory)
    if text.strip() and not ("<|start|>" in text and "<|message|>" in text):
        raise InputError(
            f"{directory}: the chat template is not of harmony, the format in which gpt-oss's chats are written and "
            f"read. If the model was trained in harmony, delete {place}; else its chats cannot be served.",
            field=TEMPLATE_NAME,
        )


@contextmanager
def panics_told(what: str, remedy: str = _AGAIN) -> Iterator[None]:
    """Turns any exception of the library into an InputError, and hides its panics from the terminal."""
    try:
        with _standard_error_unused():
            yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # pyo3's PanicException among them
        raise InputError(f"{what}: {short(str(error)) or type(error).__name__}. {remedy}") from None


@contextmanager
def _standard_error_unused() -> Iterator[None]:
    """Redirects the file descriptor, because a panic does not write to sys.stderr."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
