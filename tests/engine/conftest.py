"""A tiny random checkpoint, an fp32 engine over it, transformers' model as the oracle; a tokenizer for short texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from npu_gptoss.engine import Engine
from tests.checkpoints import new_checkpoint, write_random_checkpoint
from tests.oracle import load_oracle

if TYPE_CHECKING:
    from transformers import GptOssForCausalLM

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")  # ids 0 to 4 of the tests' tokenizer


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_checkpoint(tmp_path_factory)


@pytest.fixture(scope="session")
def engine(directory: Path) -> Engine:
    return Engine(directory, dtype="float32", num_blocks=200)


@pytest.fixture(scope="session")
def oracle(directory: Path) -> GptOssForCausalLM:
    return load_oracle(directory)


@pytest.fixture(scope="session")
def worded_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A still smaller checkpoint with a tokenizer of whole words; every id but WORDS is written wN, 511 is special."""
    path = tmp_path_factory.mktemp("worded")
    config = write_random_checkpoint(path, layers=2)
    names = {word: i for i, word in enumerate(WORDS)}
    vocabulary = {**names, **{f"w{i}": i for i in range(len(WORDS), config.vocab_size - 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w100"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|stop|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path
