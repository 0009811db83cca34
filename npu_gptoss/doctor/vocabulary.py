"""Checks that openai-harmony gets its vocabulary without the network, as in a server.

Looks in the same places and order as `harmony/library.py`, then loads the encoding from the file alone.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

from npu_gptoss.doctor.findings import Finding, failed, ok, one_line, warning
from npu_gptoss.doctor.machine import ASCEND, Machine
from npu_gptoss.files import mode_of
from npu_gptoss.harmony.library import can_load
from npu_gptoss.harmony.vocabulary import (
    BASE_VARIABLE,
    VOCABULARY_FILE,
    VocabularyError,
    build_vocabulary,
    find_vocabulary,
    is_published_vocabulary,
)

SAMPLE = "<|start|>user<|message|>What is 3 + 4?<|end|>"
REBUILD = "`npu-gptoss vocabulary MODEL_DIR` rebuilds it from a checkpoint's tokenizer.json, offline."


def vocabulary(here: Machine, model: Path | None) -> Finding:
    base = here.environ.get(BASE_VARIABLE, "")
    named = Path(base) / VOCABULARY_FILE
    if here.version("openai-harmony") is None and here.version("oss-harmony") is None:
        state = failed if here.platform()[0] == ASCEND or here.vllm else warning
        return state("openai-harmony is not installed, and gpt-oss needs it.", "`pip install openai-harmony`.")
    if base and mode_of(named) and not is_published_vocabulary(named):
        wrong = f"{named} is not the published vocabulary (size or SHA-256 differ), and the server would use it."
        return failed(wrong, f"Delete it. {REBUILD}")
    if (found := find_vocabulary(model)) is not None:
        return _loaded(found, f"found in {found}")
    if can_load():
        return ok("openai-harmony has its vocabulary in its own cache.")
    if model is None:
        rebuilt = "a server rebuilds it from its checkpoint's tokenizer.json"
        return warning(f"There is no {VOCABULARY_FILE} yet, and no --model: {rebuilt}.", REBUILD)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            build_vocabulary(model, scratch)
        except VocabularyError as error:
            remedy = f"Copy tokenizer.json from the original checkpoint, or let {BASE_VARIABLE} name a folder with it."
            return failed(f"There is no {VOCABULARY_FILE}, and it cannot be rebuilt: {error}", remedy)
        return _loaded(Path(scratch), f"rebuilt from {model / 'tokenizer.json'} when a server starts")


def _loaded(folder: Path, how: str) -> Finding:
    """Loads harmony's encoding from this folder and encodes a sample."""
    reinstall = "`pip install --force-reinstall openai-harmony`"
    with mock.patch.dict(os.environ, {BASE_VARIABLE: str(folder)}):
        try:
            import openai_harmony

            encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
            back = encoding.decode(encoding.encode(SAMPLE, allowed_special="all"))
        except Exception as error:  # the library may raise anything, a broken build an ImportError
            sentence = f"The vocabulary is there ({how}), but openai-harmony cannot load it: {one_line(error)}"
            return failed(sentence, f"{reinstall}.")
    if back != SAMPLE:
        remedy = f"{reinstall}; then delete {VOCABULARY_FILE}. {REBUILD}"
        return failed(f"openai-harmony decodes its own tokens to another text: {back!r}.", remedy)
    return ok(f"The harmony vocabulary works offline: {how}.")
