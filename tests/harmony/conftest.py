"""openai-harmony's encoding and a tokenizer.json of the published vocabulary, both without the network."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

import openai_harmony as harmony

from npu_gptoss.harmony.conversation import Names, chat_message
from npu_gptoss.harmony.conversation import conversation as with_system_turn
from npu_gptoss.harmony.encoding import Encoder, text_tokenizer
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary, write_tokenizer_files


def conversation(messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[harmony.Message]:
    names: Names = {}
    turns = [turn for message in messages for turn in chat_message("messages", message, names)]
    return with_system_turn(turns, tools)


@functools.cache
def tokenizer_files(base: Path) -> Path:
    """A directory in `base` with gpt-oss's tokenizer: five seconds, once a process."""
    pytest.importorskip("bpe_openai")
    folder = base / "gpt-oss-tokenizer"
    folder.mkdir()
    write_tokenizer_files(folder)
    return folder


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_files(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def published() -> bytes:
    pytest.importorskip("bpe_openai")
    return packaged_vocabulary()


@functools.cache
def _encoding() -> harmony.HarmonyEncoding:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


@pytest.fixture(scope="module")
def library(directory: Path) -> Iterator[harmony.HarmonyEncoding]:
    """For each file anew: the variable, by which vLLM finds the vocabulary too, is of one file only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BASE_VARIABLE, str(directory))
        yield _encoding()


@pytest.fixture(scope="module")
def encoder(directory: Path, library: harmony.HarmonyEncoding) -> Encoder:
    return Encoder(library, text_tokenizer(directory))
