"""openai-harmony's encoding, loaded without the network.

openai-harmony downloads `o200k_base.tiktoken` the first time it is asked for its encoding, unless
`TIKTOKEN_ENCODINGS_BASE` names a directory that has the file, or its own cache does. Here the file is looked for where
it may lie, and built from the checkpoint's own `tokenizer.json` when it is nowhere. The network is never asked.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from npu_gptoss.files import cache_directory, mode_of
from npu_gptoss.harmony import vocabulary
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE, VocabularyError

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TIKTOKEN_RS_CACHE_DIR"  # openai-harmony's own cache of downloads …
CACHED_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"  # … and the file's name in there, the SHA-1 of its address


def load_encoding(model_dir: Path | None = None) -> HarmonyEncoding:
    """The harmony encoding; model_dir: a checkpoint. Raises VocabularyError when there is no vocabulary to be had."""
    if not _encoding.cache_info().currsize:
        provide_vocabulary(model_dir)
    try:
        return _encoding()
    except Exception as error:  # the binding raises bare exceptions, a missing vocabulary among them
        raise VocabularyError(
            f"openai-harmony cannot load its vocabulary ({error}). `npu-gptoss vocabulary {model_dir or 'MODEL_DIR'}` "
            "rebuilds it from the checkpoint without a network."
        ) from error


@functools.cache
def _encoding() -> HarmonyEncoding:
    import openai_harmony as harmony  # not at the top: the doctor asks `can_load` where it is not installed

    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def provide_vocabulary(model_dir: Path | None) -> None:
    """Let openai-harmony find the vocabulary; raise VocabularyError with the remedy when there is none."""
    if can_load():
        return
    directory = vocabulary.find_vocabulary(model_dir)
    if directory is None and model_dir is None:
        raise VocabularyError(
            f"openai-harmony needs {VOCABULARY_FILE}, and it lies neither in ${BASE_VARIABLE} "
            f"({os.environ.get(BASE_VARIABLE) or 'unset'}) nor in {cache_directory()}. Run `npu-gptoss vocabulary "
            f"MODEL_DIR` on a checkpoint with its tokenizer.json, and set {BASE_VARIABLE} to the directory that it "
            "prints. It is not downloaded."
        )
    if directory is None:
        directory = _built(model_dir)
        logger.info("The harmony vocabulary was built from %s into %s.", model_dir / "tokenizer.json", directory)
    os.environ[BASE_VARIABLE] = str(directory)


def _built(model_dir: Path) -> Path:
    """Builds the vocabulary into the cache; into the temporary folder where a read-only home takes none."""
    for folder in (cache_directory(), Path(tempfile.gettempdir()) / f"npu_gptoss-{os.getuid()}"):
        try:
            return vocabulary.build_vocabulary(model_dir, folder).parent
        except VocabularyError as error:
            if error.field != "--output":  # not about the folder
                raise
            said = str(error).partition(" Name a")[0]
    raise VocabularyError(f"{said} Let XDG_CACHE_HOME or TMPDIR name a writable folder.", field="TMPDIR")


def can_load() -> bool:
    """True when openai-harmony finds the vocabulary without the network."""
    try:
        importlib.metadata.version("oss-harmony")  # a build of the library that has the ranks inside
        return True
    except importlib.metadata.PackageNotFoundError:
        pass
    base = os.environ.get(BASE_VARIABLE)
    if base:
        return bool(mode_of(Path(base) / VOCABULARY_FILE))
    cache = os.environ.get(CACHE_VARIABLE) or str(Path(tempfile.gettempdir()) / "tiktoken-rs-cache")
    return vocabulary.is_published_vocabulary(Path(cache) / CACHED_FILE)
